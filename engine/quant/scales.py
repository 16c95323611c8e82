"""The scales of a matrix: how many a checkpoint stores, in which shape, and what they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ..errors import ModelError
from .format import Stored
from .headers import EXPONENTS
from .settings import SCALES, Headers

if TYPE_CHECKING:
    from torch import Tensor

TENSOR, CHANNEL = (0, 0), (1, 0)  # blocks: all of the matrix, and one row of it


@dataclass(frozen=True)
class Scales:
    """One number for each block of a matrix [N, K]; blocks at the end may be ragged."""

    suffix: str
    block: tuple[int, int]  # rows and columns of a block; 0: all there are
    shape: tuple[int, ...] | None = None  # as stored, where it is not the usual one
    dtypes: tuple[str, ...] = SCALES  # EXPONENTS: bytes that stand for powers of two

    @property
    def exponents(self) -> bool:
        return self.dtypes == EXPONENTS

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """How many of them there are, down and across."""
        return -(-rows // (self.block[0] or rows)), -(-columns // (self.block[1] or columns))

    def group(self, columns: int) -> int:
        """Columns that share a scale."""
        return min(self.block[1] or columns, columns)

    def stored(self, rows: int, columns: int) -> Stored:
        usual = (1,) if self.block == TENSOR else self.blocks(rows, columns)
        return Stored(usual if self.shape is None else self.shape, self.dtypes)

    def read(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """fp32 [N, ceil(K / group)], one a row whatever the blocks were: parts of a fused matrix keep their own."""
        found = tensors[self.suffix]
        down, across = self.blocks(rows, columns)
        values = (powers_of_two(found) if self.exponents else found.float()).reshape(down, across)
        return values.repeat_interleave(self.block[0] or rows, dim=0)[:rows].contiguous()


def powers_of_two(exponents: Tensor) -> Tensor:
    """e8m0 → fp32: 2^(e - 127), with 255 no number (OCP Microscaling Formats 1.0, 5.4.1)."""
    import torch

    bits = exponents.view(torch.uint8).int()
    bits = torch.where(bits == 0, 1 << 22, torch.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.view(torch.float32)


def find_scales(path: str, stored: Headers, suffix: str, block: tuple[int, int] | None = None) -> Scales:
    """How the scales of `path` are stored, by their shape beside the matrix's: for all, a row, or a block.

    `block`: rows and columns, as the configuration has them. Raises ModelError where the shape fits none of these.
    """
    whole = stored["weight"][1]
    if len(whole) != 2 or 0 in whole:
        raise ModelError(f"{path}.weight has shape {list(whole)}, which is no matrix: download the checkpoint again")
    rows, columns = whole
    if suffix not in stored:
        raise ModelError(
            f"{path}.weight is {stored['weight'][0]}, without a {suffix} beside it: download the checkpoint again"
        )
    dtype, shape = stored[suffix]
    bare = tuple(size for size in shape if size != 1)
    dtypes = EXPONENTS if dtype in EXPONENTS else SCALES
    candidates = [TENSOR, CHANNEL, (1, 32)] if dtypes == EXPONENTS else [TENSOR, CHANNEL, (128, 128)]
    for candidate in [*([block] if block else []), *candidates]:
        scales = Scales(suffix, candidate, shape, dtypes)
        down, across = scales.blocks(rows, columns)
        if bare == tuple(size for size in (down, across) if size != 1) and prod(shape) == down * across:
            return scales
    expected = f"one scale, one for each of {rows} rows"
    if block and block not in (TENSOR, CHANNEL):
        down, across = Scales(suffix, block).blocks(rows, columns)
        expected += f", or {[down, across]}, one a block of {block[0]} × {block[1] or columns}"
    raise ModelError(
        f"{path}.{suffix} has shape {list(shape)}, expected is {expected}: correct quantization_config in config.json, "
        "or download the checkpoint again"
    )
