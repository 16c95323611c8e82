"""The experts of a mixture as packed codes (planes.py), read as they are: 4 and 8 bits beside 16-bit activations.

The products are those of moe_triton.py, over the same blocks of rows; only the tiles of the weight are made of codes in
registers, as in quant_linear.py. A tile of the first product is half of gate and half of up: the halves meet in its
activation. FP8 experts with many rows are multiplied by FP8 activations (moe_fp8.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from ..launch.tiles import fits, tile_table
from ..linear.planes import BITS, TILE, decoders
from ..linear.quant_linear import TRITON, _numbers, _of_groups, _one_of, _scaled_numbers
from . import moe_few
from .expert_codes import ExpertCodes
from .gating import activated, kind_of
from .moe import expert_mlp, sum_of_experts
from .moe_blocks import Order, order_pairs, pairs_of_block, place_of_program
from .moe_lora import ExpertLora, LowRows, lora_arguments, low_rows, plus_lora, slots_of_pairs
from .moe_route import LITTLE_PAIRS
from .moe_triton import needs_sort, sum_pairs


class CodesTile(NamedTuple):
    block_m: int  # rows of x
    block_n: int  # rows of the weight; in the first product half of them are gate's, half up's
    warps: int = 4
    stages: int = 4
    fold: bool = False  # as of quant_linear.QuantTile
    group: int = 1  # blocks of rows whose programs share tiles of the weight


def experts_codes(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    of: int | None = None,
    lora: ExpertLora | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """kernels.moe.experts with codes; x bf16 or fp16, gate_up with two parts."""
    if x.is_cuda:
        return experts_codes_triton(
            x, ids, weights, gate_up, down, gate_up_bias, down_bias, limit=limit, beside=beside, of=of, lora=lora,
            residual=residual,
        )  # fmt: skip
    return experts_codes_torch(
        x, ids, weights, gate_up, down, gate_up_bias, down_bias, limit=limit, beside=beside, lora=lora,
        residual=residual,
    )  # fmt: skip


def experts_codes_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    lora: ExpertLora | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    def first(expert: int, rows: torch.Tensor) -> torch.Tensor:
        inner = F.linear(rows.float(), gate_up.numbers(expert))
        return inner if gate_up_bias is None else inner + gate_up_bias[expert]

    def second(expert: int, gates: torch.Tensor) -> torch.Tensor:
        y = F.linear(gates.float(), down.numbers(expert))
        return y if down_bias is None else y + down_bias[expert]

    return sum_of_experts(x, ids, weights, expert_mlp(first, second, limit, lora), beside, residual)


@lru_cache
def codes_tile(product: str, rows: float, bits: int, group: int) -> CodesTile:
    """Of "gate_up" or "down", by rows an expert gets on average. Both have blocks of the same rows, which are sorted
    once."""
    for row in tile_table("experts_codes"):
        mine = (row["product"], row["bits"]) == (product, bits) and fits(row["max_group"], group or 1 << 30)
        if mine and fits(row["max_rows"], rows):
            return CodesTile(*(row[name] for name in CodesTile._fields))
    raise LookupError(f"no tile of experts_codes is for {product} of {bits} bits")


def tokens_of_codes(top_k: int, num_experts: int, kinds: set[str]) -> list[int]:
    """Numbers of tokens that together meet every variant of the kernels here and of sort_pairs, of such codes."""
    bits = {BITS[kind] for kind in kinds}
    limits = {row["max_rows"] for row in tile_table("experts_codes") if row["bits"] in bits and row["max_rows"]}
    if "e4m3" in kinds:
        limits |= {row[name] for row in tile_table("experts_fp8") for name in ("min_rows", "max_rows") if row[name]}
    most = [int(rows * num_experts / top_k) for rows in limits]
    beyond = int(2 * max(limits, default=1) * num_experts / top_k)
    longest = LITTLE_PAIRS // top_k  # that are sorted in small pieces
    return sorted({max(1, tokens) for tokens in (1, 17, *most, beyond, longest, longest + 1)})


def experts_codes_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    tiles: tuple[CodesTile, CodesTile] | None = None,
    sort: bool | None = None,
    of: int | None = None,
    lora: ExpertLora | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tiles` (of gate and up, of down: with the same rows) and `sort` override the choice."""
    (num_tokens, hidden), top_k, num_experts = x.shape, ids.shape[1], len(down.words)
    if x.stride(1) != 1 or x.dtype not in TRITON or (hidden, down.columns) != (gate_up.columns, gate_up.rows):
        raise ValueError(
            f"experts of {gate_up.columns} columns as codes take contiguous rows of bf16 or fp16, got {x.dtype} "
            f"{tuple(x.shape)} with strides {x.stride()}"
        )
    if num_tokens == 0:
        return torch.empty_like(x) if residual is None else residual
    shape = num_tokens, top_k, of or num_experts
    rows = num_tokens * top_k / shape[2]
    first, second = tiles or (
        codes_tile("gate_up", rows, BITS[gate_up.kind], gate_up.group),
        codes_tile("down", rows, BITS[down.kind], down.group),
    )
    inner = torch.empty((num_tokens * top_k, gate_up.rows), dtype=x.dtype, device=x.device)
    results = torch.empty((num_tokens * top_k, down.rows), dtype=x.dtype, device=x.device)
    order = order_pairs(ids, num_experts, first.block_m, needs_sort(*shape) if sort is None else sort)
    if tiles is None and lora is None and moe_few.takes(x, order):
        moe_few.experts_few(x, gate_up, gate_up_bias, inner, order, top_k, num_tokens, limit)
        moe_few.experts_few(inner, down, down_bias, results, order, 1, num_tokens, limit)
        return sum_pairs(results, weights, beside, residual)
    low = low_rows(x, lora, "gate_up", order, top_k, first.block_m)
    _launch(x, gate_up, gate_up_bias, inner, order, top_k, first, num_tokens, limit, low)
    low = low_rows(inner, lora, "down", order, top_k, second.block_m)
    _launch(inner, down, down_bias, results, order, 1, second, num_tokens, limit, low)
    return sum_pairs(results, weights, beside, residual)


def _launch(
    x: torch.Tensor,
    matrices: ExpertCodes,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: Order,
    top_k: int,
    tile: CodesTile,
    num_tokens: int,
    limit: float,
    low: LowRows | None,
) -> None:
    """x: row pair // top_k is a pair's → out [pairs, N], of two parts activated and multiplied."""
    one, scales, shifts = matrices.of(0), matrices.scales, matrices.shifts
    width = tile.block_n // matrices.parts
    row_stride, block_stride, tile_stride = one.strides
    fold = matrices.group > 0 and tile.fold
    asm = decoders(matrices.kind, matrices.table, x.dtype, fold, fold and shifts is not None)
    _codes_kernel[(order.max_blocks * triton.cdiv(matrices.rows, width),)](
        x, matrices.words, scales, scales if shifts is None else shifts, scales if bias is None else bias, out,
        order.pairs, order.experts, order.num_blocks, len(out), order.max_blocks, len(matrices.words), matrices.rows,
        matrices.columns, matrices.padded_rows, one.blocks, scales.shape[1], x.stride(0), matrices.words.stride(0),
        scales.stride(0), row_stride, block_stride, tile_stride, scales.stride(1),
        0 if bias is None else bias.stride(0), limit,
        ASM0=asm[0], ASM1=asm[1], ASM2=asm[-2], ASM3=asm[-1], PLANE=one.plane, PLANES=len(asm), GROUP=matrices.group,
        HAS_SHIFT=shifts is not None, HAS_BIAS=bias is not None, EVEN_K=matrices.columns % one.block_columns == 0,
        FOLD=fold, TOP_K=top_k, GATED=matrices.parts == 2, ACT=kind_of(limit), SORTED=order.sort, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, TILE_ROWS=TILE, SHARING=tile.group, STAGES=tile.stages, num_warps=tile.warps,
        **lora_arguments(low, x), **pdl_options(x, num_tokens),
    )  # fmt: skip


@triton.jit
def rows_of_tile(tile, N, padded_n, GATED: tl.constexpr, BLOCK_N: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Rows of the weight [BLOCK_N] for the columns of the result that the tile has; those past the end read rows of the
    last 64 again. Of two parts, the first half is of the first."""
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    place = tl.arange(0, BLOCK_N)
    n = tile * WIDTH + place % WIDTH
    return tl.minimum(n, padded_n - TILE_ROWS + n % TILE_ROWS) + place // WIDTH * padded_n


@triton.jit
def halves(both):
    """[2 N, M] → the first N rows, and the others."""
    SIZE: tl.constexpr = both.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(both, [2, SIZE, both.shape[1]]), [1, 2, 0]))


@triton.jit
def with_bias(acc, bias_ptr, tile, N, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """acc [BLOCK_N, rows of x] + the bias of an expert."""
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    place = tl.arange(0, BLOCK_N)
    column = tl.minimum(tile * WIDTH + place % WIDTH, N - 1) + place // WIDTH * N
    return acc + tl.load(bias_ptr + column).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _codes_kernel(
    x_ptr, words_ptr, scales_ptr, shifts_ptr, bias_ptr, out_ptr, pairs_ptr, experts_ptr, num_blocks_ptr,
    num_pairs, max_blocks, num_experts, N, K, padded_n, blocks, groups, stride_x, stride_words, stride_scales,
    row_stride, block_stride, tile_stride, group_stride, stride_bias, limit,
    h_ptr, b_ptr, slots_ptr, used_ptr, stride_slot, stride_b,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    PLANE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, FOLD: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    SORTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_ROWS: tl.constexpr,
    SHARING: tl.constexpr, STAGES: tl.constexpr, LORA: tl.constexpr, RANK: tl.constexpr, SLOT_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[pair, n] = w[expert, n] · x[pair // TOP_K] + b; gated: of rows n of both parts, activated and multiplied.
    LORA: with what the adapters of rows add. How codes become numbers, and sums of groups: see
    quant_linear._quant_kernel."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCK_K: tl.constexpr = PLANE * PLANES
    SCALED: tl.constexpr = PLANES if GROUP == 0 or GROUP >= BLOCK_K else GROUP // PLANE
    COUNT: tl.constexpr = PLANES // SCALED
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    block_m, tile, expert = place_of_program(
        experts_ptr, num_blocks_ptr, max_blocks, num_experts, tl.cdiv(N, WIDTH), SHARING, SORTED
    )
    if expert >= num_experts:
        return
    pair = pairs_of_block(pairs_ptr, block_m, num_pairs, BLOCK_M, BLOCK_M, SORTED)
    row_exists = (pair < num_pairs)[None, :]
    i = tl.arange(0, PLANE)
    row = rows_of_tile(tile, N, padded_n, GATED, BLOCK_N, TILE_ROWS)
    rows = words_ptr + expert * stride_words + (row // TILE_ROWS).to(tl.int64)[:, None] * tile_stride
    rows += (row % TILE_ROWS)[:, None] * row_stride
    scales_ptr += expert * stride_scales
    shifts_ptr += expert * stride_scales
    if GROUP == 0:
        row_scale = tl.load(scales_ptr + row).to(tl.float32)
        if HAS_SHIFT:
            row_shift = tl.load(shifts_ptr + row).to(tl.float32)
    elif not FOLD:
        s0, s1, s2, s3 = _of_groups(scales_ptr + row, 0, groups - 1, group_stride, BLOCK_K, GROUP, COUNT)
        if HAS_SHIFT:
            b0, b1, b2, b3 = _of_groups(shifts_ptr + row, 0, groups - 1, group_stride, BLOCK_K, GROUP, COUNT)
    x_rows = tl.where(pair < num_pairs, pair // TOP_K, 0).to(tl.int64)
    x_ptrs = x_ptr + x_rows[None, :] * stride_x + i[:, None]
    ones = tl.full([BLOCK_N, PLANE], 1.0, tl.float32).to(dtype)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    inputs = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # of the group: their sum, in all rows
    for block in tl.range(0, blocks, num_stages=STAGES):
        words = tl.load(rows + block * block_stride + i[None, :])
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
                    group = tl.minimum(k // GROUP, groups - 1) * group_stride
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
    if HAS_BIAS:
        acc = with_bias(acc, bias_ptr + expert * stride_bias, tile, N, GATED, BLOCK_N)
    n = tile * WIDTH + tl.arange(0, WIDTH)
    if LORA:
        slot = slots_of_pairs(slots_ptr, used_ptr, pair, pair < num_pairs, SLOT_K)
        near = tl.minimum(n, N - 1)
        b_ptr += expert * stride_b
    if GATED:
        gate, up = halves(acc)
        if LORA:
            gate = plus_lora(gate, h_ptr, b_ptr, slot, pair, near, 0, stride_slot, 2, RANK)
            up = plus_lora(up, h_ptr, b_ptr, slot, pair, near + N, 1, stride_slot, 2, RANK)
        acc = activated(gate, up, limit, ACT)
    elif LORA:
        acc = plus_lora(acc, h_ptr, b_ptr, slot, pair, near, 0, stride_slot, 1, RANK)
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_exists & (n < N)[:, None])
