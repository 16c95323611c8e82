"""Products with a quantised matrix: what is kept of its codes, and how it is multiplied by."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .codes import Codes, rows_at_once
from .packed import PackedMatrix

SLICE = 1 << 19  # elements that the CPU makes numbers of at a time: they stay in its cache until they are multiplied
INT4_GROUPS = (256, 128, 64, 32)  # that torch's product takes


def make_matrix(codes: Codes, dtype: torch.dtype = torch.float32, exact: bool = False) -> nn.Module:
    """The module that multiplies by `codes`: ([T, K], dtype) → [T, N] in that dtype. dtype: of activations; exact: on
    the CPU, nothing is rounded to less."""
    if codes.codes.device.type == "cuda":
        return PackedMatrix(codes, dtype) if PackedMatrix.takes(codes, dtype) else FloatMatrix(codes.numbers(dtype))
    if Int4Matrix.takes(codes) and not exact:
        return Int4Matrix(codes)
    return CodesMatrix(codes)


def _weight(tensor: Tensor) -> nn.Parameter:
    """In memory of its own: what comes from a checkpoint may lie in its file, or in a larger matrix."""
    return nn.Parameter(tensor.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _summand(codes: Codes) -> Tensor | None:
    """b [N, groups], where w = scale · value(code) - b."""
    summand = None if codes.zeros is None else codes.scales * codes.zeros
    return summand if codes.minima is None else codes.minima + (0 if summand is None else summand)


class FloatMatrix(nn.Module):
    """A part that is not quantised beside others that are, or in a way that no kernel takes."""

    name = "a plain product"

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = _weight(weight)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return functional.linear(x, self.weight).to(dtype)


class Int4Matrix(nn.Module):
    """torch's product for the CPU: activations, scales and results in bf16, sums in fp32."""

    name = "torch's int4 product"

    @staticmethod
    def takes(codes: Codes) -> bool:
        plain = codes.bits <= 4 and codes.table is None and codes.codes.dtype in (torch.uint8, torch.int8)
        rows, columns = codes.shape
        return plain and _int4_group(codes) is not None and columns % codes.group == 0 and rows % 64 == 0

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        group = _int4_group(codes)
        assert group is not None
        codes = codes.unsigned()
        if group != codes.group:
            codes = codes.regrouped(group)
        self.group = group
        self.order = None if codes.order is None else _weight(codes.order)
        parts = codes.codes.split(rows_at_once(codes.shape[1], codes.codes.device))  # int32 is eight times as large
        self.weight = _weight(torch.cat([torch._convert_weight_to_int4pack_for_cpu(part.int(), 1) for part in parts]))
        summand = _summand(codes)
        shift = 8 * codes.scales - (0 if summand is None else summand)  # torch's: scale · (code - 8) + shift
        self.scales = _weight(torch.stack((codes.scales.t(), shift.t()), dim=2).bfloat16())

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        y = torch._weight_int4pack_mm_for_cpu(x.bfloat16(), self.weight, self.group, self.scales)
        return y.to(dtype)


def _int4_group(codes: Codes) -> int | None:
    """The largest group that torch's product takes, and that divides the one they have."""
    return next((group for group in INT4_GROUPS if codes.group % group == 0), None)


class CodesMatrix(nn.Module):
    """The codes as they are, two in a byte where they have four bits or fewer; y = s · (q · x) - b · Σx by groups."""

    name = "codes made numbers as they are multiplied"

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        codes = codes.unsigned()
        self.group, (self.rows, self.columns) = codes.group, codes.shape
        stored, table = codes.codes, codes.table
        self.paired = codes.bits <= 4 and stored.dtype == torch.uint8 and self.columns % 2 == 0
        if self.paired:
            table = torch.arange(16.0, device=stored.device) if table is None else table
            table = functional.pad(table, (0, 16 - len(table)))
            stored = stored[:, ::2] | stored[:, 1::2] << 4
            table = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)  # [256, 2]: of both halves
        self.codes, self.scales = _weight(stored), _weight(codes.scales)
        self.table = None if table is None else _weight(table)
        summand = _summand(codes)
        self.summand = None if summand is None else _weight(summand)
        self.order = None if codes.order is None else _weight(codes.order)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        x = x.float()
        y = x.new_empty(x.shape[0], self.rows)
        step = max(1, SLICE // self.columns)
        for start in range(0, self.rows, step):
            values = self._scaled(slice(start, start + step))
            # With one row, torch's product of matrices is slower than that of a matrix and a vector.
            y[:, start : start + step] = values.mv(x[0])[None] if len(x) == 1 else x @ values.t()
        if len(self.scales[0]) == 1:
            y *= self.scales[:, 0]
        if self.summand is not None:
            y -= self._group_sums(x) @ self.summand.t()
        return y.to(dtype)

    def _scaled(self, rows: slice) -> Tensor:
        """fp32 [rows, K]: what the codes mean, times the scales where a row has several."""
        values = self._values(self.codes[rows])
        scales = self.scales[rows]
        if scales.shape[1] == 1:
            return values
        if self.columns % self.group:
            return values.mul_(scales.repeat_interleave(self.group, dim=1)[:, : self.columns])
        values.view(len(values), -1, self.group).mul_(scales[:, :, None])
        return values

    def _values(self, codes: Tensor) -> Tensor:
        if self.paired:
            assert self.table is not None
            both = self.table.view(torch.float64).view(-1)  # two fp32 fetched as one
            return both.index_select(0, codes.view(-1).int()).view(torch.float32).view(len(codes), self.columns)
        if self.table is not None:
            return self.table[codes.int()]
        if codes.dtype == torch.float8_e4m3fn:
            # Sign, four bits of exponent and three of mantissa into their places in an fp16, whose exponent counts from
            # 15 where theirs does from 7; torch's own conversion takes ten times as long. NaN becomes ±480.
            bits = codes.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~0x4000)
            return bits.view(torch.float16).float().mul_(256.0)
        if codes.dtype == torch.float8_e5m2:  # the upper half of an fp16
            return codes.view(torch.int8).short().bitwise_left_shift_(8).view(torch.float16).float()
        return codes.float()

    def _group_sums(self, x: Tensor) -> Tensor:
        """[T, K] → [T, groups]."""
        padded = functional.pad(x, (0, -self.columns % self.group))
        return padded.view(len(x), padded.shape[1] // self.group, self.group).sum(dim=2)
