"""Activations as FP8: each row by itself, scaled by its largest number; alone, or where a norm or SwiGLU makes them.

The columns stand as planes.py has those of 8-bit codes: within 128 of them 0, 64, 1, 65, …, filled up with zeros. Sums
over columns are the same in any order that both operands have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..attention.kv_fp8 import packs
from ..launch.pdl import pdl_options
from ..norm.activation import magnitude, of_magnitude
from ..norm.norm import normalize, rms_scale

MAX = 448.0  # of e4m3
SMALLEST = 1e-10  # of a row's largest number: what is less is 0
BLOCK = 128  # columns


class Fp8Rows(NamedTuple):
    """x[t, k] = scales[t, g] · values[t, place of k], g = k // 128 or the row's only one."""

    values: torch.Tensor  # float8_e4m3fn [T, K rounded up to 128]
    scales: torch.Tensor  # fp32 [groups, T]
    dtype: torch.dtype  # of what it was, and of results

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


class Product(NamedTuple):
    """y[t, n] = values[t, n] · rows[t] · columns[n]: of FP8 operands, not scaled yet."""

    values: torch.Tensor  # bf16 [T, N]
    rows: torch.Tensor  # fp32 [1, T]
    columns: torch.Tensor  # fp32 [N]


def fp8_rows(x: torch.Tensor, by_group: bool = False) -> Fp8Rows:
    """x [T, K] with contiguous rows, in scales of a row, or of 128 columns."""
    if x.is_cuda:
        return fp8_rows_triton(x, by_group)
    return fp8_rows_torch(x, by_group)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float, by_group: bool = False) -> Fp8Rows:
    """Of rms_norm (norm.py), not rounded in between."""
    if x.is_cuda:
        return fp8_rows_triton(x, by_group, weight, eps)
    return fp8_rows_torch(normalize(x.float(), weight, eps), by_group)._replace(dtype=x.dtype)


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0,
    by_group: bool = False,
) -> Fp8Rows:  # fmt: skip
    """The same of residual += scale · x, as add_rms_norm has it; residual is updated in place."""
    if x.is_cuda:
        return fp8_rows_triton(x, by_group, weight, eps, residual, scale)
    residual.copy_(residual.float().add(x, alpha=scale))
    return rms_norm_fp8(residual, weight, eps, by_group)


def silu_mul_fp8(y: torch.Tensor | Product, dtype: torch.dtype, by_group: bool = False) -> Fp8Rows:
    """silu(gate) · up of y [T, 2I] = cat(gate, up), which may be not scaled yet."""
    values = y.values if isinstance(y, Product) else y
    if values.is_cuda:
        return silu_mul_fp8_triton(y, dtype, by_group)
    gate, up = (scaled_torch(y) if isinstance(y, Product) else y.float()).chunk(2, dim=-1)
    return fp8_rows_torch(F.silu(gate) * up, by_group)._replace(dtype=dtype)


def scaled_torch(y: Product) -> torch.Tensor:
    return y.values.float() * y.rows[0, :, None] * y.columns


def interleaved(values: torch.Tensor) -> torch.Tensor:
    """[T, K] → [T, K rounded up to 128], in the order of the columns."""
    values = F.pad(values, (0, -values.shape[1] % BLOCK))
    return values.view(len(values), -1, 2, BLOCK // 2).transpose(2, 3).flatten(1)


def fp8_rows_torch(x: torch.Tensor, by_group: bool = False) -> Fp8Rows:
    values = F.pad(x.float(), (0, -x.shape[1] % BLOCK))
    groups = values.view(len(x), -1, BLOCK if by_group else values.shape[1])
    largest = groups.abs().amax(2, keepdim=True).clamp_(min=SMALLEST)
    factor = torch.full_like(largest, MAX) / largest  # MAX / largest is rounded twice, which moves numbers at borders
    codes = interleaved((groups * factor).clamp(-MAX, MAX).flatten(1)).to(torch.float8_e4m3fn)
    return Fp8Rows(codes, (largest / MAX).squeeze(2).t().contiguous(), x.dtype)


def _empty(x: torch.Tensor, columns: int, by_group: bool, dtype: torch.dtype) -> tuple[Fp8Rows, int]:
    blocks = triton.cdiv(columns, BLOCK)
    return Fp8Rows(
        torch.empty(len(x), blocks * BLOCK, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(blocks if by_group else 1, len(x), dtype=torch.float32, device=x.device),
        dtype,
    ), triton.next_power_of_2(blocks)


def _warps(blocks: int) -> int:
    """A thread has 16 numbers."""
    return min(32, max(1, blocks * BLOCK // 512))


def fp8_rows_triton(
    x: torch.Tensor,
    by_group: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> Fp8Rows:
    """With weight: of its norm; with residual: of that of the sum."""
    rows, columns = x.shape
    out, blocks = _empty(x, columns, by_group, x.dtype)
    if rows:
        _rows_kernel[(rows,)](
            x, x if residual is None else residual, x if weight is None else weight,
            out.values.view(torch.int16), out.scales, rows, columns, x.stride(0),
            0 if residual is None else residual.stride(0), out.shape[1] // 2, eps,
            SIZE=columns, NORM=weight is not None, ADD=residual is not None, SCALE=scale, BY_GROUP=by_group,
            BLOCKS=blocks, PACKED=packs(x.device), num_warps=_warps(blocks), **pdl_options(x, rows),
        )  # fmt: skip
    return out


def silu_mul_fp8_triton(y: torch.Tensor | Product, dtype: torch.dtype, by_group: bool = False) -> Fp8Rows:
    values = y.values if isinstance(y, Product) else y
    rows, columns = values.shape[0], values.shape[1] // 2
    out, blocks = _empty(values, columns, by_group, dtype)
    if rows:
        _silu_kernel[(rows,)](
            values, y.rows if isinstance(y, Product) else out.scales, y.columns if isinstance(y, Product) else values,
            out.values.view(torch.int16), out.scales, rows, columns, values.stride(0), out.shape[1] // 2,
            SCALED=isinstance(y, Product), BY_GROUP=by_group, BLOCKS=blocks, PACKED=packs(values.device),
            num_warps=_warps(blocks), **pdl_options(values, rows),
        )  # fmt: skip
    return out


@triton.jit
def e4m3_words(low, high, PACKED: tl.constexpr):
    """fp32 numbers → int16 words of their codes, `low` in the low bytes; what is beyond 448 becomes 448.

    PACKED: by the instruction that makes both. It is not for speed: of casts whose bytes are put together afterwards
    ptxas 12.8 makes code for Hopper that gives every second word another low byte."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )
    low_codes = tl.clamp(low, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    high_codes = tl.clamp(high, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return low_codes.to(tl.int16) | (high_codes.to(tl.int16) << 8)


@triton.jit
def scale_and_factor(largest):
    """Of rows or groups whose numbers have these largest magnitudes (activation.py): the scale of their codes, and what
    makes codes of numbers. One division each: a division a number took a third of these kernels' instructions."""
    largest = tl.maximum(of_magnitude(largest), 1e-10, propagate_nan=tl.PropagateNan.ALL)
    return largest / 448.0, tl.div_rn(tl.zeros_like(largest) + 448.0, largest)


@triton.jit
def _write(
    first, second, words_ptr, scales_ptr, row, rows, columns, BY_GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """first and second [BLOCKS, 64], the halves of each 128 columns: bytes of neighbours, one word of both. NaN is in
    the scale, too: what the codes of such a row or group are does not matter."""
    largest = tl.maximum(tl.max(magnitude(first), 1), tl.max(magnitude(second), 1))
    if not BY_GROUP:
        largest = tl.zeros_like(largest) + tl.max(largest, 0)
    scales, factor = scale_and_factor(largest)
    block = tl.arange(0, BLOCKS)
    exists = block * 128 < columns
    if BY_GROUP:
        tl.store(scales_ptr + block * rows + row, scales, mask=exists)
    else:
        tl.store(scales_ptr + row + tl.zeros_like(block), scales, mask=block == 0)
    words = e4m3_words(first * factor[:, None], second * factor[:, None], PACKED)
    place = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(words_ptr + place, words, mask=exists[:, None])


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x_ptr, residual_ptr, weight_ptr, words_ptr, scales_ptr, rows, columns, x_stride, residual_stride, words_stride, eps,
    SIZE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr, BY_GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 64)[None, :]
    first_exists, second_exists = first < columns, first + 64 < columns
    if NORM:  # a weight, which no kernel writes
        first_gain = tl.load(weight_ptr + first, mask=first_exists, other=0.0).to(tl.float32)
        second_gain = tl.load(weight_ptr + first + 64, mask=second_exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x_ptr += row * x_stride
    a = tl.load(x_ptr + first, mask=first_exists, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + first + 64, mask=second_exists, other=0.0).to(tl.float32)
    if ADD:
        residual_ptr += row * residual_stride
        dtype: tl.constexpr = residual_ptr.dtype.element_ty
        rest_a = tl.load(residual_ptr + first, mask=first_exists, other=0.0).to(tl.float32)
        rest_b = tl.load(residual_ptr + first + 64, mask=second_exists, other=0.0).to(tl.float32)
        sum_a = (a * SCALE + rest_a).to(dtype)
        sum_b = (b * SCALE + rest_b).to(dtype)
        tl.store(residual_ptr + first, sum_a, mask=first_exists)
        tl.store(residual_ptr + first + 64, sum_b, mask=second_exists)
        a = sum_a.to(tl.float32)
        b = sum_b.to(tl.float32)
    if NORM:
        scale = rms_scale(tl.sum(tl.sum(a * a + b * b, 1), 0), SIZE, eps)
        a = a * scale * first_gain
        b = b * scale * second_gain
    _write(a, b, words_ptr + row * words_stride, scales_ptr, row, rows, columns, BY_GROUP, BLOCKS, PACKED)


@triton.jit(do_not_specialize=["rows"])
def _silu_kernel(
    y_ptr, row_scales_ptr, column_scales_ptr, words_ptr, scales_ptr, rows, columns, y_stride, words_stride,
    SCALED: tl.constexpr, BY_GROUP: tl.constexpr, BLOCKS: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 64)[None, :]
    a = _gated(y_ptr, row_scales_ptr, column_scales_ptr, row, first, columns, y_stride, SCALED)
    b = _gated(y_ptr, row_scales_ptr, column_scales_ptr, row, first + 64, columns, y_stride, SCALED)
    _write(a, b, words_ptr + row * words_stride, scales_ptr, row, rows, columns, BY_GROUP, BLOCKS, PACKED)


@triton.jit
def _gated(y_ptr, row_scales_ptr, column_scales_ptr, row, column, columns, y_stride, SCALED: tl.constexpr):
    mask = column < columns
    gate = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(y_ptr + row * y_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(row_scales_ptr + row)
        gate *= scale * tl.load(column_scales_ptr + column, mask=mask, other=0.0)
        up *= scale * tl.load(column_scales_ptr + columns + column, mask=mask, other=0.0)
    return gate * tl.sigmoid(gate) * up
