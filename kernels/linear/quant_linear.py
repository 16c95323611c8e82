"""Products of some rows with packed codes (planes.py): y = x Wᵀ + b. Few take the time in which the codes stream from
memory.

A tile of rows of the weight is the large operand of the tensor cores. Its codes become numbers in the registers that
these take them from; a group's scale is applied to the group's sum, in fp32, or, where sums of many rows fill the
registers, to the numbers. Where numbers are shifted (zero points,
minima), the sum of a group's inputs comes out of a product with ones. K is split and PDL used as in linear.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from ..launch.tiles import fits, tile_table
from .linear import prepare, store_sum
from .planes import BITS, TILE, Packed, decoded, decoders, scaled, scaled_and_shifted, unpacked
from .quant_few import MAX_ROWS, quant_few, streams_codes
from .quant_many import many_rows, many_tile, quant_many, takes_many

MAX_BLOCK_M = 128
TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class QuantTile(NamedTuple):
    """Blocks of columns are loaded `stages` ahead; splits: of the columns, over programs; without room for their sums
    there is one; prefetch: how many blocks go into the L2 cache before the wait; fold: scales and shifts of groups go
    into the numbers, each rounded again, else into sums of the group."""

    warps: int = 4
    stages: int = 4
    splits: int = 1
    prefetch: int = 0
    block_n: int = TILE  # or twice as many
    block_m: int = MAX_BLOCK_M  # at most
    fold: bool = False


def quant_linear(
    x: torch.Tensor, matrix: Packed, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ + b for x [M, K] in bf16 or fp16 with contiguous rows, added up in fp32 and rounded once: to x's dtype, or
    to that of out [M, N], with contiguous rows. bias [N], any float dtype. Calls on a device share linear.py's
    workspace. A row's result is the same, bit for bit, in every call with the same tile and as many splits."""
    if x.is_cuda:
        return quant_linear_triton(x, matrix, bias, out)
    return quant_linear_torch(x, matrix, bias, out)


def quant_linear_torch(
    x: torch.Tensor, matrix: Packed, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    y = x.float() @ unpacked(matrix).t()
    if bias is not None:
        y += bias
    return y.to(x.dtype) if out is None else out.copy_(y)


@lru_cache
def quant_tile(m: int, n: int, bits: int) -> QuantTile:
    """The fastest of those measured."""
    for row in tile_table("quant_linear"):
        if row["bits"] == bits and fits(row["max_rows"], m) and fits(row["max_n"], n):
            return QuantTile(**{name: row[name] for name in QuantTile._fields if name in row})
    return QuantTile()


@lru_cache
def quant_rows(n: int, kind: str, fp8: bool, device: torch.device) -> int:
    """Up to how many rows quant_linear is faster than what else there is: FP8 products, or numbers in a scratch."""
    bits = BITS[kind]
    rows = tile_table("quant_rows")
    found = next(row["rows"] for row in rows if row["bits"] == bits and row["fp8"] == fp8 and fits(row["max_n"], n))
    return found if fp8 else max(found, many_rows(n, kind, device))


def quant_linear_triton(
    x: torch.Tensor,
    matrix: Packed,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    tile: QuantTile | None = None,
) -> torch.Tensor:
    """quant_linear on Triton; `tile` overrides the choice."""
    (m, k), n = x.shape, matrix.rows
    if k != matrix.columns or x.stride(1) != 1 or x.dtype not in TRITON:
        raise ValueError(
            f"quant_linear takes contiguous rows [M, {matrix.columns}] in bf16 or fp16, got {x.dtype} {tuple(x.shape)} "
            f"with strides {x.stride()}"
        )
    if out is None:
        out = x.new_empty(m, n)
    if m == 0:
        return out
    if tile is None and m <= MAX_ROWS and streams_codes(x.device):
        return quant_few(x, matrix, bias, out)
    bits = BITS[matrix.kind]
    if tile is None and m <= many_rows(n, matrix.kind, x.device) and takes_many(x):
        many = many_tile(m, n, bits)
        if many is not None:
            return quant_many(x, matrix, bias, out, many)
    tile = tile or quant_tile(m, n, bits)
    block_m = min(tile.block_m, max(16, triton.next_power_of_2(m)))
    workspace = prepare(x.device)
    grid = triton.cdiv(n, tile.block_n), min(tile.splits, matrix.blocks), triton.cdiv(m, block_m)
    tiles = grid[0] * grid[2]
    if grid[1] > 1 and (
        tiles * grid[1] * tile.block_n * block_m > workspace.partials.numel() or tiles > len(workspace.counters)
    ):
        grid = grid[0], 1, grid[2]
    row_stride, block_stride, tile_stride = matrix.strides
    scales, shifts = matrix.scales, matrix.shifts
    fold = matrix.group > 0 and tile.fold
    asm = decoders(matrix.kind, matrix.table, x.dtype, fold, fold and shifts is not None)
    _quant_kernel[grid](
        x, matrix.words, scales, scales if shifts is None else shifts, x if bias is None else bias, out,
        workspace.partials, workspace.counters, m, n, k, matrix.blocks, len(scales),
        x.stride(0), out.stride(0), row_stride, block_stride, tile_stride, scales.stride(0),
        ASM0=asm[0], ASM1=asm[1], ASM2=asm[-2], ASM3=asm[-1], PLANE=matrix.plane, PLANES=len(asm), GROUP=matrix.group,
        HAS_SHIFT=shifts is not None, HAS_BIAS=bias is not None, EVEN_K=k % matrix.block_columns == 0,
        FOLD=fold, BLOCK_M=block_m, BLOCK_N=tile.block_n, TILE_ROWS=TILE, SPLITS=grid[1], STAGES=tile.stages,
        PREFETCH=tile.prefetch,
        num_warps=tile.warps, **pdl_options(x, m),
    )  # fmt: skip
    return out


@triton.jit
def _numbers(words, plane: tl.constexpr, ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr,
             ASM3: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    if plane == 0:
        return decoded(words, ASM0, dtype)
    elif plane == 1:
        return decoded(words, ASM1, dtype)
    elif plane == 2:
        return decoded(words, ASM2, dtype)
    else:
        return decoded(words, ASM3, dtype)


@triton.jit
def _scaled_numbers(
    words, scale, shift, plane: tl.constexpr, ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr,
    ASM3: tl.constexpr, HAS_SHIFT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    ASM: tl.constexpr = ASM0 if plane == 0 else ASM1 if plane == 1 else ASM2 if plane == 2 else ASM3
    if HAS_SHIFT:
        return scaled_and_shifted(words, scale, shift, ASM, dtype)
    else:
        return scaled(words, scale, ASM, dtype)


@triton.jit
def _one_of(which: tl.constexpr, a, b, c, d):
    if which == 0:  # noqa: SIM116
        return a
    elif which == 1:
        return b
    elif which == 2:
        return c
    else:
        return d


@triton.jit
def _of_groups(values_ptr, block, last, stride, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """Rows' values of the up to four groups that a block has; groups after the last one are that."""
    first = block * BLOCK_K // GROUP
    a = tl.load(values_ptr + tl.minimum(first, last) * stride)
    b = tl.load(values_ptr + tl.minimum(first + 1, last) * stride) if COUNT > 1 else a
    c = tl.load(values_ptr + tl.minimum(first + 2, last) * stride) if COUNT > 2 else a
    d = tl.load(values_ptr + tl.minimum(first + 3, last) * stride) if COUNT > 2 else a
    return a, b, c, d


@triton.jit(do_not_specialize=["M"])
def _quant_kernel(
    x_ptr, words_ptr, scales_ptr, shifts_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr,
    M, N, K, blocks, groups, stride_x, stride_out, row_stride, block_stride, tile_stride, group_stride,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    PLANE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, FOLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_ROWS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_K: tl.constexpr = PLANE * PLANES
    # Planes whose sums one scale is for: of a group that is no larger than a block, else of the whole block.
    SCALED: tl.constexpr = PLANES if GROUP == 0 or GROUP >= BLOCK_K else GROUP // PLANE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, PLANE)
    first = split * blocks // SPLITS
    end = (split + 1) * blocks // SPLITS
    # Rows past the last tile re-read rows of it.
    row = tl.minimum(n, tl.cdiv(N, TILE_ROWS) * TILE_ROWS - TILE_ROWS + n % TILE_ROWS)
    rows = words_ptr + (row // TILE_ROWS).to(tl.int64)[:, None] * tile_stride
    rows += (row % TILE_ROWS)[:, None] * row_stride
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            # Loads into shared memory belong to the loop behind the wait; the L2 cache can be filled before it.
            block = tl.minimum(first + tl.arange(0, PREFETCH), end - 1)[None, :]
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r",
                [(rows + block * block_stride).to(tl.int64), PLANE * 2],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    COUNT: tl.constexpr = PLANES // SCALED
    # A weight, too: on its way while the kernel before this one ends. What does not come through shared memory is
    # fetched one block ahead by hand.
    if GROUP == 0:
        row_scale = tl.load(scales_ptr + row).to(tl.float32)
        if HAS_SHIFT:
            row_shift = tl.load(shifts_ptr + row).to(tl.float32)
    elif not FOLD:
        s0, s1, s2, s3 = _of_groups(scales_ptr + row, first, groups - 1, group_stride, BLOCK_K, GROUP, COUNT)
        if HAS_SHIFT:
            b0, b1, b2, b3 = _of_groups(shifts_ptr + row, first, groups - 1, group_stride, BLOCK_K, GROUP, COUNT)
    if PDL:
        gdc_wait()

    x_ptrs = x_ptr + m.to(tl.int64)[None, :] * stride_x + i[:, None]
    row_exists = (m < M)[None, :]
    ones = tl.full([BLOCK_N, PLANE], 1.0, tl.float32).to(dtype)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    inputs = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # of the group: their sum, in all rows
    for block in tl.range(first, end, num_stages=STAGES):
        words = tl.load(rows + block * block_stride + i[None, :], eviction_policy="evict_first")
        if GROUP > 0 and not FOLD:
            t0, t1, t2, t3 = _of_groups(scales_ptr + row, block + 1, groups - 1, group_stride, BLOCK_K, GROUP, COUNT)
            if HAS_SHIFT:
                c0, c1, c2, c3 = _of_groups(
                    shifts_ptr + row, block + 1, groups - 1, group_stride, BLOCK_K, GROUP, COUNT
                )
        for part in tl.static_range(COUNT):
            total = acc if GROUP == 0 or FOLD else tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for plane in tl.static_range(part * SCALED, (part + 1) * SCALED):
                k = block * BLOCK_K + plane * PLANE
                mask = row_exists if EVEN_K else row_exists & (k + i < K)[:, None]
                x = tl.load(x_ptrs + k, mask=mask, other=0.0)
                if FOLD:
                    group = tl.minimum((block * BLOCK_K + plane * PLANE) // GROUP, groups - 1) * group_stride
                    scale = tl.load(scales_ptr + row + group).to(tl.float32)
                    shift = tl.load(shifts_ptr + row + group).to(tl.float32) if HAS_SHIFT else scale
                    w = _scaled_numbers(words, scale, shift, plane, ASM0, ASM1, ASM2, ASM3, HAS_SHIFT, dtype)
                else:
                    w = _numbers(words, plane, ASM0, ASM1, ASM2, ASM3, dtype)
                total = tl.dot(w, x, total)
                if HAS_SHIFT and not FOLD:
                    inputs = tl.dot(ones, x, inputs)
            if GROUP == 0 or FOLD:
                acc = total
            else:
                acc += total * _one_of(part, s0, s1, s2, s3).to(tl.float32)[:, None]
                if HAS_SHIFT:
                    acc -= inputs * _one_of(part, b0, b1, b2, b3).to(tl.float32)[:, None]
                    inputs = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if GROUP > 0 and not FOLD:
            s0, s1, s2, s3 = t0, t1, t2, t3
            if HAS_SHIFT:
                b0, b1, b2, b3 = c0, c1, c2, c3
    if GROUP == 0:
        acc *= row_scale[:, None]
        if HAS_SHIFT:
            acc -= inputs * row_shift[:, None]

    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * stride_out + n[:, None]
    out_mask = row_exists & (n < N)[:, None]
    place = tl.program_id(2) * tl.num_programs(0) + tile
    store_sum(
        acc, out_ptrs, out_mask, bias_ptr, n, N, partials_ptr + place * (SPLITS * BLOCK_N * BLOCK_M),
        counters_ptr + place, split, HAS_BIAS, BLOCK_M, BLOCK_N, SPLITS,
    )  # fmt: skip
