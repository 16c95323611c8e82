"""The matrices of a mixture's experts as packed codes (planes.py), side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..linear.planes import Packed, unpacked


class ExpertCodes(NamedTuple):
    """The same matrix, or two (gate and up), of all experts: as Packed, E of them one after the other."""

    words: torch.Tensor  # int16 [E, …]: as Packed.words, the parts' rows one after the other
    scales: torch.Tensor  # fp16 or fp32 [E, groups, parts · N rounded up to 64]
    shifts: torch.Tensor | None  # like scales
    kind: str  # of planes.BITS
    table: tuple[float, ...]
    group: int
    rows: int  # N, of a part
    columns: int  # K
    parts: int  # 1, or 2

    @classmethod
    def empty(cls, num_experts: int, parts: int, like: Packed) -> ExpertCodes:
        """For so many experts with parts as this one is. What is not set means nothing; shifts come with `fitting`."""
        words = like.words.new_empty(num_experts, parts * len(like.words), *like.words.shape[1:])
        groups, padded = like.scales.shape
        scales = like.scales.new_zeros(num_experts, groups, parts * padded)
        return cls(words, scales, None, like.kind, like.table, like.group, like.rows, like.columns, parts)

    @property
    def padded_rows(self) -> int:
        return self.scales.shape[2] // self.parts

    def of(self, expert: int, part: int = 0) -> Packed:
        """One matrix: views."""
        size, rows = self.words.shape[1] // self.parts, self.padded_rows
        place = slice(part * rows, (part + 1) * rows)
        shifts = None if self.shifts is None else self.shifts[expert, :, place]
        return Packed(
            self.words[expert, part * size : (part + 1) * size], self.scales[expert, :, place], shifts, self.kind,
            self.table, self.group, self.rows, self.columns,
        )  # fmt: skip

    def holds(self, matrix: Packed) -> bool:
        """Whether it is stored as these are. Scales may be wider, shifts there or not."""
        mine, its = self.of(0), matrix
        return (mine.kind, mine.table, mine.group, mine.rows, mine.columns, mine.words.shape) == (
            its.kind, its.table, its.group, its.rows, its.columns, its.words.shape,
        )  # fmt: skip

    def fitting(self, matrix: Packed) -> ExpertCodes:
        """The same with room for the matrix's scales and shifts, as they are."""
        dtype = torch.promote_types(self.scales.dtype, matrix.scales.dtype)
        shifts = self.shifts
        if matrix.shifts is not None:
            dtype = torch.promote_types(dtype, matrix.shifts.dtype)
            shifts = torch.zeros_like(self.scales) if shifts is None else shifts
        return self._replace(scales=self.scales.to(dtype), shifts=None if shifts is None else shifts.to(dtype))

    def numbers(self, expert: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[parts · N, K]: what they mean."""
        return torch.cat([unpacked(self.of(expert, part), dtype) for part in range(self.parts)])
