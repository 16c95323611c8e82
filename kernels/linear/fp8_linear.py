"""FP8 × FP8 products for many rows: activations of fp8_rows.py with weights of 8-bit floats as planes.py packs them.

cuBLAS multiplies fastest where one scale is for all: so the codes are multiplied as they are, and what comes next takes
in the scales of rows and columns: SwiGLU's quantisation, the addition to the residual stream, or a pass of its own.
Where tiles are too few to fill the card, and where 128 columns have scales of their own, a kernel of ours multiplies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch.pdl import launched_plainly, pdl_options
from ..launch.tiles import fits, tile_table
from .fp8_rows import BLOCK, Fp8Rows, Product, interleaved, scaled_torch
from .linear import prepare, store_sum
from .planes import Packed, unpacked

FAST = True  # sums in the tensor cores' own registers, as others have them: some 14 bits, beside codes of 4


class Fp8Tile(NamedTuple):
    """Of our kernel: 0 columns of x: cuBLAS multiplies."""

    block_m: int = 0
    block_n: int = 128
    warps: int = 8
    stages: int = 4
    splits: int = 1


CUBLAS = Fp8Tile()
OURS = Fp8Tile(128)


def takes_fp8(matrix: Packed) -> bool:
    """Whether x can be FP8, too: blocks of columns are those of fp8_rows.py."""
    return matrix.kind == "e4m3" and matrix.shifts is None and matrix.block_columns == BLOCK and (
        matrix.group % BLOCK == 0
    )  # fmt: skip


def fp8_values(matrix: Packed) -> torch.Tensor:
    """[N rounded up to 64, K rounded up to 128], a view."""
    return matrix.words.view(len(matrix.words), -1).view(torch.float8_e4m3fn)


@lru_cache
def unit(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def fp8_linear(
    x: Fp8Rows, matrix: Packed, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """x Wᵀ + b [T, N], in out_dtype, else x's. residual [T, N], contiguous rows: is added to and returned."""
    if not x.values.is_cuda:
        return fp8_linear_torch(x, matrix, bias, residual, out_dtype)
    tile = fp8_tile(x.shape[0], matrix.rows, bool(matrix.group))
    if tile.block_m and residual is None:
        return fp8_linear_triton(x, matrix, bias, tile, out_dtype)
    if tile.block_m or matrix.group:
        assert residual is not None
        y = fp8_linear_triton(x, matrix, bias, tile, out_dtype)
        return residual.add_(y)
    return scaled(fp8_product(x, matrix), out_dtype or x.dtype, bias, residual)


def fp8_linear_torch(
    x: Fp8Rows, matrix: Packed, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    values = x.values.float()
    values = values * x.scales.t().repeat_interleave(values.shape[1] // len(x.scales), dim=1)
    y = values @ interleaved(unpacked(matrix)).t()
    if bias is not None:
        y += bias
    return y.to(out_dtype or x.dtype) if residual is None else residual.add_(y)


def fp8_gate(x: Fp8Rows, matrix: Packed) -> torch.Tensor | Product:
    """x Wᵀ for silu_mul_fp8, which takes it as it comes."""
    if not x.values.is_cuda:
        return fp8_linear_torch(x, matrix)
    tile = fp8_tile(x.shape[0], matrix.rows, bool(matrix.group))
    return fp8_linear_triton(x, matrix, None, tile) if tile.block_m else fp8_product(x, matrix)


def fp8_product(x: Fp8Rows, matrix: Packed) -> Product:
    """The codes' product by cuBLAS, rows with one scale each."""
    one = unit(x.values.device)
    launched_plainly(x.values.device)
    y = torch._scaled_mm(x.values, fp8_values(matrix).t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=FAST)
    return Product(y[:, : matrix.rows], x.scales, matrix.scales[0])


def scaled(
    y: Product, dtype: torch.dtype, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The product's numbers, in dtype [T, N]; or added to residual."""
    if y.values.is_cuda:
        return scaled_triton(y, dtype, bias, residual)
    values = scaled_torch(y)
    if bias is not None:
        values += bias
    return values.to(dtype) if residual is None else residual.add_(values)


def scaled_triton(
    y: Product, dtype: torch.dtype, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    rows, columns = y.values.shape
    out = torch.empty(rows, columns, dtype=dtype, device=y.values.device) if residual is None else residual
    if rows:
        block = min(1024, triton.next_power_of_2(columns))
        _scale_kernel[(rows, triton.cdiv(columns, block))](
            y.values, y.rows, y.columns, y.columns if bias is None else bias, out, columns,
            y.values.stride(0), out.stride(0),
            HAS_BIAS=bias is not None, ADD=residual is not None, BLOCK=block, num_warps=max(1, block // 256),
            **pdl_options(y.values, MANY),
        )  # fmt: skip
    return out


MANY = 1 << 30  # rows: a launch after cuBLAS's, which does not take part


@lru_cache
def fp8_tile(m: int, n: int, groups: bool) -> Fp8Tile:
    """The fastest of those measured."""
    for row in tile_table("fp8_linear"):
        if row["groups"] == groups and fits(row["max_rows"], m) and fits(row["max_n"], n):
            return Fp8Tile(row["block_m"], row["block_n"], row["warps"], row["stages"], row["splits"])
    return OURS if groups else CUBLAS


def fp8_linear_triton(
    x: Fp8Rows, matrix: Packed, bias: torch.Tensor | None = None, tile: Fp8Tile = OURS,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    rows, columns = x.shape
    weight = fp8_values(matrix)
    if weight.shape[1] != columns:
        raise ValueError(f"fp8_linear takes x of {weight.shape[1]} columns, got {columns}")
    out = torch.empty(rows, matrix.rows, dtype=out_dtype or x.dtype, device=x.values.device)
    if rows == 0:
        return out
    workspace = prepare(out.device)
    block_m = min(tile.block_m, max(16, triton.next_power_of_2(rows)))
    across, down = triton.cdiv(matrix.rows, tile.block_n), triton.cdiv(rows, block_m)
    splits = min(tile.splits, columns // BLOCK)
    if across * down * splits * tile.block_n * block_m > workspace.partials.numel() or across * down > len(
        workspace.counters
    ):
        splits = 1
    scales = matrix.scales if matrix.scales.dtype == torch.float32 else matrix.scales.float()
    _fp8_kernel[(across, splits, down)](
        x.values, x.scales, weight, scales, scales if bias is None else bias, out,
        workspace.partials, workspace.counters, rows, matrix.rows, len(weight), columns // BLOCK,
        x.values.stride(0), weight.stride(0), x.scales.stride(0), scales.stride(0), out.stride(0),
        X_GROUPS=len(x.scales) > 1, W_GROUP=matrix.group // BLOCK, HAS_BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=BLOCK, SPLITS=splits, STAGES=tile.stages,
        num_warps=tile.warps, **pdl_options(out, MANY),
    )  # fmt: skip
    return out


@triton.jit
def _scale_kernel(
    y_ptr, rows_ptr, columns_ptr, bias_ptr, out_ptr, columns, y_stride, out_stride,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    values = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    values *= tl.load(rows_ptr + row) * tl.load(columns_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row * out_stride + column
    if ADD:
        values += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "stride_x_scales"])
def _fp8_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr,
    M, N, padded_n, blocks, stride_x, stride_w, stride_x_scales, stride_w_scales, stride_out,
    X_GROUPS: tl.constexpr, W_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """W_GROUP: blocks of columns that share a scale; 0: a row's all."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = split * blocks // SPLITS
    end = (split + 1) * blocks // SPLITS
    # Rows past the end re-read the last one: the loads need no masks.
    row = tl.minimum(m, M - 1)
    w_rows = tl.minimum(n, padded_n - 1)
    w_ptrs = w_ptr + w_rows.to(tl.int64)[:, None] * stride_w + k[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * stride_x + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(first, end, num_stages=STAGES):
        w = tl.load(w_ptrs + block * BLOCK_K)
        x = tl.load(x_ptrs + block * BLOCK_K)
        if X_GROUPS or W_GROUP > 0:
            total = tl.dot(w, x)
            if W_GROUP > 0:
                scale = tl.load(w_scales_ptr + block // W_GROUP * stride_w_scales + w_rows)
                total *= scale[:, None]
            if X_GROUPS:
                total *= tl.load(x_scales_ptr + block * stride_x_scales + row)[None, :]
            acc += total
        else:
            acc = tl.dot(w, x, acc)
    if W_GROUP == 0:
        acc *= tl.load(w_scales_ptr + w_rows)[:, None]
    if not X_GROUPS:
        acc *= tl.load(x_scales_ptr + row)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * stride_out + n[:, None]
    out_mask = (m < M)[None, :] & (n < N)[:, None]
    place = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    store_sum(
        acc, out_ptrs, out_mask, bias_ptr, n, N, partials_ptr + place * (SPLITS * BLOCK_N * BLOCK_M),
        counters_ptr + place, split, HAS_BIAS, BLOCK_M, BLOCK_N, SPLITS,
    )  # fmt: skip
