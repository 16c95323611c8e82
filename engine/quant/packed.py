"""A quantised matrix on a GPU: its codes packed as the kernels read them, and which of these multiplies by the rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from ...kernels.linear.dequantize import dequantized_linear, numbers, prepare_scratch
from ...kernels.linear.fp8_linear import fp8_gate, fp8_linear, takes_fp8, unit
from ...kernels.linear.fp8_rows import Fp8Rows, Product, fp8_rows
from ...kernels.linear.linear import prepare
from ...kernels.linear.planes import E2M1, Packed, pack, plane_width
from ...kernels.linear.quant_few import MAX_ROWS, quant_few, streams_codes
from ...kernels.linear.quant_linear import TRITON, quant_linear, quant_rows
from .codes import Codes
from .products import Products
from .unquantized import ADD_ROWS

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
