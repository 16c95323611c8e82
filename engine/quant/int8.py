"""Whole numbers a byte each, as compressed-tensors stores them for products with 8-bit inputs (INT8 W8A8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..errors import ModelError
from .format import DUMMY_STD, Stored
from .fp8 import one_number
from .headers import beside, refuse_scaled_inputs
from .scales import Scales, find_scales
from .settings import SCALES, Headers, whole_groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes

_ZEROS = ("I8", "I32", *SCALES)


@dataclass(frozen=True)
class Int8:
    """w = (weight - weight_zero_point) · weight_scale, codes of `bits` bits in bytes.

    `static`: the checkpoint fixes the input's scale. One that fixes a zero point as well is served with a scale for
    each token instead, which has no rounding that the fixed one would avoid: `Codes` has no zero point of the input.
    """

    as_stored: ClassVar[bool] = True  # codes are the file's
    scales: Scales
    bits: int = 8
    zeros: Scales | None = None
    static: bool = False
    beside: tuple[tuple[str, Stored], ...] = ()

    @property
    def name(self) -> str:
        rows, columns = self.scales.block
        share = f"G={columns}" if columns else "per channel" if rows else "per tensor"
        zeros = ", zero points" if self.zeros else ""
        return f"INT{self.bits} {share}{zeros}{', static' if self.static else ''}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        if self.scales.block[0] == 1:
            whole_groups(columns, self.scales.block[1] or None)
        tensors = {
            "weight": Stored((rows, columns), ("I8",)),
            self.scales.suffix: self.scales.stored(rows, columns),
            **dict(self.beside),
        }
        if self.zeros is not None:
            tensors[self.zeros.suffix] = self.zeros.stored(rows, columns)
        if self.static:
            tensors["input_scale"] = replace(tensors.get("input_scale", Stored((1,), SCALES)), optional=False)
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .codes import Codes

        low, high = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        if self.bits < 8 and not (low <= int(tensors["weight"].min()) and int(tensors["weight"].max()) <= high):
            raise ModelError(
                f"weight holds codes from {int(tensors['weight'].min())} to {int(tensors['weight'].max())}, with "
                f"num_bits {self.bits} they go from {low} to {high}: correct config.json, or download it again"
            )
        scales = self.scales.read(tensors, rows, columns)
        zeros = None if self.zeros is None else self.zeros.read(tensors, rows, columns)
        input_scale = None
        if self.static and "input_zero_point" not in tensors:
            input_scale = one_number(tensors["input_scale"], "input_scale")
        group = self.scales.group(columns)
        return Codes(tensors["weight"], scales, group, self.bits, zeros, input_scale=input_scale)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        from .codes import Codes

        device, highest = generator.device, 2 ** (self.bits - 1) - 1
        spread = highest / 4
        values = torch.empty(rows, columns, device=device).normal_(0, spread, generator=generator)
        codes = values.round_().clamp_(-highest, highest).to(torch.int8)
        group = self.scales.group(columns)
        scales = torch.full((rows, -(-columns // group)), DUMMY_STD / spread, device=device)
        zeros = None if self.zeros is None else torch.zeros_like(scales)
        return Codes(codes, scales, group, self.bits, zeros, input_scale=4 / 127 if self.static else None)


def find_int8(
    path: str, stored: Headers, bits: int = 8, static: bool = False, block: tuple[int, int] | None = None
) -> Int8:
    """How the module at `path` is stored, by its headers. Raises ModelError where scales have no known shape."""
    refuse_scaled_inputs(path, stored)
    scales = find_scales(path, stored, "weight_scale", block)
    zeros = None
    if "weight_zero_point" in stored:
        zeros = Scales("weight_zero_point", scales.block, scales.shape, _ZEROS)
    return Int8(scales, bits, zeros, static, beside(stored))


def plain_int8(block: tuple[int, int], bits: int, symmetric: bool, static: bool) -> Int8:
    """As the configuration has it, where there are no files."""
    zeros = None if symmetric else Scales("weight_zero_point", block, dtypes=_ZEROS)
    return Int8(Scales("weight_scale", block), bits, zeros, static)
