"""A quantised matrix as every format is decoded to: one code an element, and what makes numbers of the codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor


def rows_at_once(columns: int, device: torch.device) -> int:
    """How many rows are converted at a time: fp32 on the way there takes up to ten times the room of the result, in
    each of the loader's threads; a GPU wants pieces large enough to be worth a launch. Whole blocks of 128."""
    return max(128, (1 << (21 if device.type == "cpu" else 25)) // columns // 128 * 128)


@dataclass(frozen=True)
class Codes:
    """A matrix [N, K]: w[n, k] = scales[n, g] · (value(codes[n, k]) - zeros[n, g]) - minima[n, g], g = k // group.

    value is the code itself, or table[code]. All tensors are on one device.
    """

    codes: Tensor  # [N, K], uint8, int8, float8_e4m3fn or float8_e5m2
    scales: Tensor  # fp32 [N, ceil(K / group)]
    group: int  # columns that share a scale; K: one scale a row
    bits: int  # that a code takes: with 4 or fewer two of them fit into a byte
    zeros: Tensor | None = None  # fp32, as scales: whole numbers, or for some formats any
    minima: Tensor | None = None  # fp32, as scales
    table: Tensor | None = None  # fp32 [2 ** bits], what a uint8 code means
    order: Tensor | None = None  # int64 [K]: column k multiplies input order[k]; None: input k
    input_scale: float | None = None  # of the input, where the checkpoint fixes one: x ≈ x8 · input_scale

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def rows(self, start: int, size: int) -> Codes:
        """Rows start to start + size: views, no copies."""
        end = start + size
        zeros, minima = (None if v is None else v[start:end] for v in (self.zeros, self.minima))
        return replace(self, codes=self.codes[start:end], scales=self.scales[start:end], zeros=zeros, minima=minima)

    def to(self, device: torch.device) -> Codes:
        """The same there."""
        beside = ("zeros", "minima", "table", "order")
        zeros, minima, table, order = (
            None if value is None else value.to(device) for value in (getattr(self, name) for name in beside)
        )
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros, minima=minima, table=table,
            order=order,
        )  # fmt: skip

    def in_order(self, order: Tensor) -> Codes:
        """Row order[n] as row n: a copy."""
        order = order.to(self.codes.device)
        codes = self.codes.view(torch.uint8)[order].view(self.codes.dtype)  # indexing does not know all of them
        zeros, minima = (None if v is None else v[order] for v in (self.zeros, self.minima))
        return replace(self, codes=codes, scales=self.scales[order], zeros=zeros, minima=minima)

    def columns(self, start: int, size: int) -> Codes:
        """Columns start to start + size, as a rank holds them that has this part of the input.

        Groups that the cut divides are divided: scales are repeated for the largest smaller group that fits. Raises
        ValueError where columns are in an order of their own: put them into the input's first (`ordered`).
        """
        if self.order is not None:
            raise ValueError("columns in an order of their own cannot be cut")
        if (start, size) == (0, self.shape[1]):
            return self
        group = gcd(self.group, start) if start + size == self.shape[1] else gcd(self.group, start, size)
        cut = self.regrouped(group)
        first, last = start // group, -(-(start + size) // group)
        zeros, minima = (None if v is None else v[:, first:last] for v in (cut.zeros, cut.minima))
        codes, scales = self.codes.narrow(1, start, size), cut.scales[:, first:last]
        return replace(cut, codes=codes, scales=scales, zeros=zeros, minima=minima)

    def unsigned(self) -> Codes:
        """The same with signed codes of four bits or fewer raised to where they start at 0, as products take them."""
        if self.bits > 4 or self.codes.dtype != torch.int8:
            return self
        half = 1 << (self.bits - 1)
        zeros = torch.full_like(self.scales, half) if self.zeros is None else self.zeros + half
        return replace(self, codes=(self.codes + half).to(torch.uint8), zeros=zeros)

    def regrouped(self, group: int) -> Codes:
        """The same with groups of `group` columns, which divides the group there is: scales are repeated."""
        times = self.group // group

        def repeated(values: Tensor) -> Tensor:
            return values.repeat_interleave(times, dim=1)[:, : -(-self.shape[1] // group)]

        zeros, minima = (None if v is None else repeated(v) for v in (self.zeros, self.minima))
        return replace(self, group=group, scales=repeated(self.scales), zeros=zeros, minima=minima)

    def ordered(self) -> Codes:
        """The same matrix, its columns in the order of the input: a scale an element where groups are scattered."""
        if self.order is None:
            return self
        back = torch.argsort(self.order)

        def by_column(values: Tensor | None) -> Tensor | None:
            return None if values is None else self._by_column(values)[:, back]

        scales = by_column(self.scales)
        assert scales is not None
        return replace(
            self, codes=self.codes[:, back], group=1, order=None, scales=scales, zeros=by_column(self.zeros),
            minima=by_column(self.minima),
        )  # fmt: skip

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K], columns in the order of the input: what the checkpoint means, computed in fp32."""
        if self.table is not None:
            values = self.table[self.codes.int()]
        else:
            values = self.codes.float()
        if self.zeros is not None:
            values = values - self._by_column(self.zeros)
        values = values * self._by_column(self.scales)
        if self.minima is not None:
            values = values - self._by_column(self.minima)
        if self.order is not None:
            values = values[:, torch.argsort(self.order)]
        return values.to(dtype)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The same as dequantize, some rows at a time."""
        rows, columns = self.shape
        result = torch.empty(rows, columns, dtype=dtype, device=self.codes.device)
        step = rows_at_once(columns, result.device)
        for start in range(0, rows, step):
            result[start : start + step] = self.rows(start, step).dequantize(dtype)
        return result

    def _by_column(self, values: Tensor) -> Tensor:
        """[N, ceil(K / group)] → [N, K]."""
        return values.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]


def joined(parts: Sequence[Codes | Tensor]) -> list[Codes | Tensor]:
    """The parts of a fused matrix, in their order, with neighbours that are stored alike made one. Tensors [N, K] are
    parts as floats."""
    runs: list[list[Codes | Tensor]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        plain = isinstance(part, Tensor) and isinstance(last, Tensor)
        if plain or (isinstance(part, Codes) and isinstance(last, Codes) and _alike(last, part)):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _joined(run: list[Codes | Tensor]) -> Codes | Tensor:
    """All of one kind."""
    if len(run) == 1:
        return run[0]
    codes = [part for part in run if isinstance(part, Codes)]
    if not codes:
        return torch.cat([part for part in run if isinstance(part, Tensor)])

    def stacked(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in codes]
        return None if values[0] is None else torch.cat(values)

    of_bytes = codes[0].codes.dtype  # torch.cat does not know all of them
    inputs = {part.input_scale for part in codes}
    scales = stacked("scales")
    assert scales is not None
    return replace(
        codes[0], codes=torch.cat([part.codes.view(torch.uint8) for part in codes]).view(of_bytes), scales=scales,
        zeros=stacked("zeros"), minima=stacked("minima"), input_scale=inputs.pop() if len(inputs) == 1 else None,
    )  # fmt: skip


def _alike(a: Codes, b: Codes) -> bool:
    for name in ("group", "bits"):
        if getattr(a, name) != getattr(b, name):
            return False
    for name in ("zeros", "minima"):
        if (getattr(a, name) is None) != (getattr(b, name) is None):
            return False
    for mine, other in ((a.table, b.table), (a.order, b.order)):
        if (mine is None) != (other is None) or (mine is not None and other is not None and not mine.equal(other)):
            return False
    return a.codes.dtype == b.codes.dtype
