"""Matrices of a 16-bit checkpoint, quantised as they are loaded: --quantization fp8, int8, int4, bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from .eight_bits import HEADS
from .format import DUMMY_STD, FLOATS, Stored, named, quantised
from .settings import Headers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes

# Small, and their rounding sends tokens elsewhere; or, of delta nets, decides for long what a state keeps.
ROUTERS = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
EXPERTS = ("experts", "block_sparse_moe")
# kind → (the function of quantize.py, the format's name)
KINDS = {
    "fp8": ("to_fp8", "FP8 per channel, quantized at load"),
    "fp8_blocks": ("to_fp8_blocks", "FP8 128×128 blocks, quantized at load"),
    "int8": ("to_int8", "INT8 per channel, quantized at load"),
    "int4": ("to_int4", "INT4 G=128, rounded to nearest at load"),
    "nf4": ("to_nf4", "NF4 G=64, quantized at load"),
}


@dataclass(frozen=True)
class Online:
    """A plain matrix in the file, codes in memory."""

    kind: str  # of KINDS

    @property
    def name(self) -> str:
        return KINDS[self.kind][1]

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        return {"weight": Stored((rows, columns), FLOATS)}

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .codes import Codes, joined, rows_at_once

        quantize: Callable[[Tensor], Codes] = getattr(import_module(".quantize", __package__), KINDS[self.kind][0])
        weight = tensors["weight"]
        # A row's codes are its own; of blocks, those of 128 rows.
        (whole,) = joined([quantize(part) for part in weight.split(rows_at_once(columns, weight.device))])
        assert isinstance(whole, Codes)
        return whole

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        weight = torch.empty(rows, columns, device=generator.device).normal_(0, DUMMY_STD, generator=generator)
        return self.decode({"weight": weight}, rows, columns)


class OnlineScheme:
    """All matrices but the embedding, the head and what decides (ROUTERS); or of experts alone.

    `note`: a line for the start, where something else was asked for.
    """

    def __init__(self, kind: str, note: str | None = None, experts_alone: bool = False) -> None:
        self.method = kind
        self.note = note
        self.experts_alone = experts_alone
        self.bytes_each = 0.57 if kind in ("int4", "nf4") else 1.03  # an element, its share of the scales with it
        self._format = Online(kind)

    def format(self, path: str, stored: Headers | None) -> Online | None:
        if named(path, (*HEADS, *ROUTERS)) or (self.experts_alone and not named(path, EXPERTS)):
            return None
        if stored is not None and (quantised(stored) or not any(_is_matrix(*found) for found in stored.values())):
            return None
        return self._format


def _is_matrix(dtype: str, shape: tuple[int, ...]) -> bool:
    """Of plain numbers; those of a layer's experts may be one tensor."""
    return dtype in FLOATS and len(shape) >= 2
