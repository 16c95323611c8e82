"""GPTQ: codes packed along K, zero points along N, and columns that may have been quantised in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .format import Stored
from .settings import (
    SCALES,
    Headers,
    entries,
    expression,
    flag,
    group_size,
    last,
    layout,
    names,
    number,
    other_layout,
    value,
    whole_groups,
)  # fmt: skip

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes

BITS = (2, 3, 4, 8)  # GPTQModel has 5 to 7 too, in planes
TENSORS = ("qweight", "qzeros", "scales", "g_idx")
MARLIN = ("B", "s")  # what its files call qweight and scales


@dataclass(frozen=True)
class Gptq:
    """w = (code - zero) · scale. `version` 1 stores zero - 1, which wraps around in its bits; version 2 the zero.

    borrows: GPTQModel subtracts from whole words, so that below 0 a field takes 1 of its neighbour. 3 bits it does not.
    """

    bits: int
    group: int | None  # None: one scale a row
    symmetric: bool
    version: int = 1
    borrows: bool = False

    @property
    def name(self) -> str:
        group = "channel" if self.group is None else self.group
        return f"GPTQ int{self.bits} G={group}{'' if self.symmetric else ' asymmetric'}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        groups = 1 if self.group is None else -(-columns // self.group)
        return {
            "qweight": Stored((-(-columns * self.bits // 32), rows), ("I32",)),
            "qzeros": Stored((groups, -(-rows * self.bits // 32)), ("I32",), optional=self.symmetric),
            "scales": Stored((groups, rows), SCALES),
            "g_idx": Stored((columns,), ("I32", "I64"), optional=True),
        }

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .integers import integer_codes
        from .unpack import bit_stream

        codes = bit_stream(tensors["qweight"].t(), self.bits, columns)
        zeros = None
        if "qzeros" in tensors:
            in_words = self.version == 1 and self.borrows and self.bits != 3
            words = tensors["qzeros"] + (sum(1 << i for i in range(0, 32, self.bits)) if in_words else 0)
            zeros = bit_stream(words, self.bits, rows).t()
            if self.version == 1 and not in_words:
                zeros = (zeros + 1) & ((1 << self.bits) - 1)
        groups = None if self.group is None else tensors.get("g_idx")
        if groups is None:
            whole_groups(columns, self.group)
        scales, group = tensors["scales"].t(), self.group or columns
        return integer_codes(codes, scales, zeros, group, self.bits, self.symmetric, groups)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        from .integers import random_codes

        return random_codes(rows, columns, self.bits, self.group or columns, self.symmetric, generator)


class GptqScheme:
    """quant_method gptq: of AutoGPTQ, GPTQModel and transformers."""

    method = "gptq"
    widths: Sequence[int] = BITS

    def __init__(self, config: Mapping[str, Any]) -> None:
        form = layout(config, "checkpoint_format", "format", among=("gptq", "gptq_v2"), default="gptq")
        self.version = 2 if form == "gptq_v2" else 1
        self.borrows = "gptqmodel" in str(value(config, "meta", default="")).lower()
        self.base = self._read(config)
        self.lm_head = flag(config, "lm_head", False)
        self.modules = names(config, "modules_in_block_to_quantize")
        self.kept = names(config, "modules_to_not_convert")
        # Ordered: the first that matches the start of a module's path counts. "-:": what it matches is not quantised.
        self.dynamic = [
            (
                expression(pattern.removeprefix("-:").removeprefix("+:"), "dynamic"),
                self._override(config, pattern, entry),
                _orders({**config, **entry}),
            )
            for pattern, entry in entries(config, "dynamic").items()
        ]
        self._orders_others = _orders(config)
        self.orders_columns = self._orders_others or any(ordered for *_, ordered in self.dynamic)

    def orders(self, path: str) -> bool:
        """Whether the configuration says that the module's columns have an order. g_idx, in its files, decides: this is
        for who has to know before."""
        ordered = next((ordered for pattern, _, ordered in self.dynamic if pattern.match(path)), self._orders_others)
        return ordered and self.format(path, None) is not None

    def format(self, path: str, stored: Headers | None) -> Gptq | None:
        matched = [override for pattern, override, _ in self.dynamic if pattern.match(path)]
        found = matched[0] if matched else self.base
        if stored is None:
            return found if self._quantised(path, bool(matched)) else None
        if all(suffix in stored for suffix in MARLIN):
            raise other_layout("Marlin")
        return (found or self.base) if any(suffix in stored for suffix in TENSORS) else None

    def _read(self, config: Mapping[str, Any]) -> Gptq:
        bits = number(config, "bits", among=self.widths)
        symmetric = flag(config, "sym", True)
        return Gptq(bits, group_size(config, "group_size", default=128), symmetric, self.version, self.borrows)

    def _override(self, config: Mapping[str, Any], pattern: str, entry: Mapping[str, Any]) -> Gptq | None:
        return None if pattern.startswith("-:") else self._read({**config, **entry})

    def _quantised(self, path: str, matched: bool) -> bool:
        """What the configuration says, where there are no files."""
        if last(path) == "embed_tokens":
            return False
        if last(path) == "lm_head":
            return self.lm_head or matched
        if any(name in path for name in self.kept):
            return False
        return not self.modules or any(path.endswith(name) for name in self.modules)


def _orders(config: Mapping[str, Any]) -> bool:
    """One group has no order, and of groups that were chosen beforehand (static_groups) the columns lie in theirs."""
    meta = value(config, "meta", default={})
    places = (config, meta) if isinstance(meta, Mapping) else (config,)
    if any(place.get("static_groups") is True for place in places):
        return False
    return flag(config, "desc_act", False) and group_size(config, "group_size", default=128) is not None
