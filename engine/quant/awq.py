"""AWQ as AutoAWQ's gemm version stores it: 4 bits, eight rows of the output interleaved in a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .format import Stored
from .settings import SCALES, Headers, flag, group_size, last, layout, names, number, whole_groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes

BITS = 4
PER_WORD = 8
SHIFTS = tuple(BITS * nibble for nibble in (0, 4, 1, 5, 2, 6, 3, 7))  # of the eight rows, in a word
TENSORS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class Awq:
    """w = (code - zero) · scale. The factors of activations are folded into the norms before."""

    group: int | None  # None: one scale a row
    symmetric: bool = False

    @property
    def name(self) -> str:
        return f"AWQ int4 G={'channel' if self.group is None else self.group}{' symmetric' if self.symmetric else ''}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        if rows % PER_WORD:
            raise ModelError(
                f"AWQ packs {PER_WORD} rows into a word, this matrix has {rows}: export the checkpoint again as gptq "
                "or compressed-tensors"
            )
        whole_groups(columns, self.group)
        groups = 1 if self.group is None else -(-columns // self.group)
        return {
            "qweight": Stored((columns, rows // PER_WORD), ("I32",)),
            "qzeros": Stored((groups, rows // PER_WORD), ("I32",), optional=self.symmetric),
            "scales": Stored((groups, rows), SCALES),
        }

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .integers import integer_codes

        zeros = _unpack(tensors["qzeros"]) if "qzeros" in tensors else None
        codes, scales = _unpack(tensors["qweight"]), tensors["scales"].t()
        return integer_codes(codes, scales, zeros, self.group or columns, BITS, self.symmetric)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        from .integers import random_codes

        return random_codes(rows, columns, BITS, self.group or columns, self.symmetric, generator)


def _unpack(words: Tensor) -> Tensor:
    """int32 [K, N / 8] → uint8 [N, K]."""
    from .unpack import fields

    return fields(words.t().contiguous(), BITS, SHIFTS, 1).flatten(0, 1)


class AwqScheme:
    """quant_method awq: of AutoAWQ, GPTQModel and transformers."""

    method = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        backend = config.get("backend")
        if backend == "llm-awq":  # transformers has the packing's name here
            config = {**config, "version": backend}
        layout(config, "version", "checkpoint_format", "format", among=("gemm",), default="gemm")
        number(config, "bits", "w_bit", among=(BITS,), default=BITS)
        group = group_size(config, "group_size", "q_group_size", default=128)
        self.base = Awq(group, not flag(config, "zero_point", True))
        self.kept = names(config, "modules_to_not_convert")

    def format(self, path: str, stored: Headers | None) -> Awq | None:
        if stored is None:
            kept = last(path) in ("lm_head", "embed_tokens") or any(name in path for name in self.kept)
            return None if kept else self.base
        return self.base if any(suffix in stored for suffix in TENSORS) else None
