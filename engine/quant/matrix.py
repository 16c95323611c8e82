"""Products with a quantised matrix: what is kept of its codes, packed for a GPU or not, and which kernel multiplies."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.linear.dequantize import dequantized_linear, numbers, prepare_scratch
from ...kernels.linear.fp8_linear import fp8_gate, fp8_linear, takes_fp8, unit
from ...kernels.linear.fp8_rows import Fp8Rows, Product, fp8_rows
from ...kernels.linear.linear import prepare
from ...kernels.linear.planes import E2M1, Packed, pack, plane_width
from ...kernels.linear.quant_few import MAX_ROWS, quant_few, streams_codes
from ...kernels.linear.quant_linear import TRITON, quant_linear, quant_rows
from .codes import Codes, rows_at_once
from .unquantized import ADD_ROWS, Products

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


OLDEST = (9, 0)  # compute capability: whose instructions make numbers of codes, and multiply FP8
FLOATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class PackedMatrix(nn.Module):
    """([T, K] in bf16 or fp16, or FP8 as `fp8_input` has it; dtype) → [T, N] in that dtype."""

    @staticmethod
    def takes(codes: Codes, dtype: torch.dtype) -> bool:
        """dtype: of activations."""
        if not has_kernels(codes.codes.device) or dtype not in TRITON or (codes.table is not None and codes.bits > 4):
            return False
        return plane_width(_kind(codes), _group(codes)) > 0

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        super().__init__()
        matrix = packed(codes)
        self.words = nn.Parameter(matrix.words, requires_grad=False)
        self.scales = nn.Parameter(matrix.scales, requires_grad=False)
        self.shifts = None if matrix.shifts is None else nn.Parameter(matrix.shifts, requires_grad=False)
        self.order = None if codes.order is None else nn.Parameter(codes.order.clone(), requires_grad=False)
        self.matrix = matrix._replace(
            words=self.words.data, scales=self.scales.data, shifts=None if self.shifts is None else self.shifts.data
        )
        self.fp8 = takes_fp8(self.matrix) and self.order is None
        self.few_rows = quant_rows(matrix.rows, matrix.kind, self.fp8, matrix.device)
        self.add_up_to = min(MAX_ROWS, self.few_rows) if self.order is None and streams_codes(matrix.device) else 0
        self.by_group = bool(matrix.group)
        self.products = Products()  # of its numbers
        self.add_rows = self.few_rows + 1 if self.fp8 else None  # from how many rows on products take the residual
        if matrix.device.type == "cuda":
            prepare(matrix.device)
            if self.fp8:
                unit(matrix.device)
            else:
                size = matrix.rows * matrix.columns
                if len(prepare_scratch(matrix.device, dtype, size)) >= size:
                    self.add_rows = max(ADD_ROWS, self.few_rows + 1)
                self.products = Products.of(matrix.rows, matrix.columns, dtype, matrix.device)
        more = ", FP8 products" if self.fp8 else ""
        self.name = f"{matrix.kind} codes: kernels for up to {self.few_rows} rows{more}"

    def forward(
        self, x: Tensor | Fp8Rows, dtype: torch.dtype, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual [T, N] is added to and returned."""
        if isinstance(x, Tensor):
            if residual is not None and x.shape[0] <= self.add_up_to:
                return quant_few(x, self.matrix, bias, residual, add=True)
            if self.order is not None:
                x = x.index_select(1, self.order)
            if x.shape[0] <= self.few_rows:
                out = None if dtype == x.dtype else torch.empty(len(x), self.matrix.rows, dtype=dtype, device=x.device)
                return _added(quant_linear(x, self.matrix, bias, out), residual)
            if not self.fp8:
                weight = numbers(self.matrix, x.dtype) if bias is None and dtype == x.dtype else None
                if weight is not None:
                    return self.products.multiply(x, weight, residual)
                return _added(dequantized_linear(x, self.matrix, bias).to(dtype), residual)
            x = fp8_rows(x, self.by_group)
        return fp8_linear(x, self.matrix, bias, residual, dtype)

    def silu_mul(self, x: Tensor) -> Tensor | None:
        """silu(gate) · up of x Wᵀ in one pass, of more than few_rows rows; None where that is not to be had."""
        if self.fp8 or x.shape[0] <= self.few_rows or not self.products.joins(x.shape[0]):
            return None
        weight = numbers(self.matrix, x.dtype)
        if weight is None:
            return None
        return self.products.silu_mul(x if self.order is None else x.index_select(1, self.order), weight)

    def gate(self, x: Tensor | Fp8Rows) -> Tensor | Product:
        """x Wᵀ as silu_mul_fp8 takes it, of more than few_rows rows."""
        return fp8_gate(fp8_rows(x, self.by_group) if isinstance(x, Tensor) else x, self.matrix)


@lru_cache
def has_kernels(device: torch.device) -> bool:
    """For codes; on other cards they become numbers as they are loaded."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST


def packed(codes: Codes) -> Packed:
    kind, group = _kind(codes), _group(codes)
    stored, scales, table = codes.codes, codes.scales, ()
    zeros: Tensor | int = 0  # of codes as they are packed
    if kind == "int4":
        stored, zeros = (stored + 8, 0) if stored.dtype == torch.int8 else (stored, -8)
    elif kind == "int8" and stored.dtype == torch.uint8:
        stored, zeros = stored ^ 0x80, -128
    elif codes.table is not None:
        numbers = codes.table.tolist()
        if kind == "e2m1":
            scales = scales * (numbers[1] / E2M1[1])
        else:
            table = (*numbers, *[0.0] * (16 - len(numbers)))
    if codes.zeros is not None:
        zeros = codes.zeros + zeros
    shifts = codes.scales * zeros if isinstance(zeros, Tensor) or zeros else None
    if codes.minima is not None:
        shifts = codes.minima if shifts is None else shifts + codes.minima
    if shifts is not None and not bool(shifts.any()):
        shifts = None
    if kind != "e4m3":  # whose products take fp32
        scales, shifts = _narrow(scales), None if shifts is None else _narrow(shifts)
    return pack(stored.view(torch.uint8), scales, kind, group, shifts, table)


def _kind(codes: Codes) -> str:
    if codes.codes.dtype in FLOATS:
        return FLOATS[codes.codes.dtype]
    if codes.table is None:
        return "int4" if codes.bits <= 4 else "int8"
    numbers = codes.table.tolist()
    factor = numbers[1] / E2M1[1] if len(numbers) == 16 else 0.0
    return "e2m1" if factor and numbers == [factor * value for value in E2M1] else "table"


def _group(codes: Codes) -> int:
    return 0 if codes.scales.shape[1] == 1 else codes.group


def _narrow(values: Tensor) -> Tensor:
    """In fp16, as checkpoints have them, unless that is further off than a rounding."""
    half = values.half()
    near = (half.float() - values).abs() <= values.abs() * 2.0**-11
    return half if bool(near.all()) else values


def _added(y: Tensor, residual: Tensor | None) -> Tensor:
    return y if residual is None else residual.add_(y)
