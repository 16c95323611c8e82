"""The products of a mixture of experts in Triton: gate and up with their activation, down, and the sum of a token's k.

A block of rows with one expert meets a tile of that expert's weight, the large operand of the tensor cores however few
the rows are. Rows are sorted by expert (sort_pairs), or, where experts hardly ever share a block, taken as they are:
then every (token, expert) is a block of its own (moe_blocks.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .gating import activated, kind_of
from .moe_blocks import Order, order_pairs, pairs_of_block, place_of_program
from .moe_lora import ExpertLora, LowRows, lora_arguments, low_rows, plus_lora, slots_of_pairs
from .moe_route import LITTLE_PAIRS

ROWS = (8, 24, 48)  # up to so many of an expert, on average, with blocks of 16, 32 and 64


class MoeTile(NamedTuple):
    block_m: int  # rows
    block_n: int  # rows of the weight: of gate, and as many of up
    block_k: int
    warps: int
    stages: int
    group: int = 1  # blocks of rows whose programs share tiles of the weight
    short: int = 0  # a block with so many rows or fewer, or twice as many, is multiplied as one of so many; 0: none is


def needs_sort(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Not where a block of rows would nearly always have one: each pair is then multiplied on its own."""
    return 4 * num_tokens * top_k > num_experts


def gate_up_tile(num_tokens: int, top_k: int, num_experts: int, itemsize: int) -> MoeTile:
    """By rows an expert gets on average."""
    rows = num_tokens * top_k / num_experts
    if itemsize > 2:  # fp32 has no tensor cores
        return MoeTile(16, 32, 32, 4, 2)
    if rows <= ROWS[0]:
        return MoeTile(16, 64, 128, 4, 4)
    if rows <= ROWS[1]:
        return MoeTile(32, 64, 64, 4, 4)
    if rows <= ROWS[2]:
        return MoeTile(64, 64, 64, 4, 4)
    return MoeTile(128, 128, 64, 8, 4, group=8, short=32)


def down_tile(num_tokens: int, top_k: int, num_experts: int, itemsize: int) -> MoeTile:
    """The same rows a block as gate_up_tile has: they are sorted once."""
    rows = num_tokens * top_k / num_experts
    if itemsize > 2:
        return MoeTile(16, 32, 32, 4, 2)
    if rows <= ROWS[0]:
        return MoeTile(16, 64, 128, 4, 4)
    if rows <= ROWS[1]:
        return MoeTile(32, 128, 64, 4, 4)
    if rows <= ROWS[2]:
        return MoeTile(64, 128, 64, 4, 4)
    return MoeTile(128, 128, 64, 8, 4, group=8, short=32)


def tokens_of_tiles(top_k: int, num_experts: int) -> list[int]:
    """Numbers of tokens that together meet every variant of the kernels here and of sort_pairs, in 16-bit types."""
    most = [rows * num_experts // top_k for rows in (*ROWS, 2 * ROWS[-1])]
    longest = LITTLE_PAIRS // top_k  # that are sorted in small pieces
    return sorted({max(1, tokens) for tokens in (1, 17, *most, longest, longest + 1)})


def experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    tiles: tuple[MoeTile, MoeTile] | None = None,
    sort: bool | None = None,
    of: int | None = None,
    lora: ExpertLora | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """kernels.moe.experts; `tiles` (of gate and up, of down: with the same rows) and `sort` override the choice."""
    (num_tokens, hidden), top_k = x.shape, ids.shape[1]
    num_experts, inner = down.shape[0], down.shape[2]
    if x.stride(1) != 1 or gate_up.stride(2) != 1 or down.stride(2) != 1:
        raise ValueError("the last dimensions of x and of the experts' weights must be contiguous: call contiguous()")
    if num_tokens == 0:
        return torch.empty_like(x) if residual is None else residual
    shape = num_tokens, top_k, of or num_experts, x.element_size()
    first, second = tiles or (gate_up_tile(*shape), down_tile(*shape))
    gates = torch.empty((num_tokens * top_k, inner), dtype=x.dtype, device=x.device)
    results = torch.empty((num_tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    order = order_pairs(ids, num_experts, first.block_m, needs_sort(*shape[:3]) if sort is None else sort)
    low = low_rows(x, lora, "gate_up", order, top_k, first.block_m)
    parts = gate_up.shape[1] // inner
    assert lora is None or parts == 2, "adapters have products of gates"
    _launch(x, gate_up, gate_up_bias, gates, order, inner, top_k, first, num_tokens, low, gated=parts == 2, limit=limit)
    low = low_rows(gates, lora, "down", order, top_k, second.block_m)
    _launch(gates, down, down_bias, results, order, hidden, 1, second, num_tokens, low, gated=False, limit=0.0)
    return sum_pairs(results, weights, beside, residual)


def sum_pairs(
    results: torch.Tensor, weights: torch.Tensor, beside: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """results [T · k, H] → [T, H]: the sum of each token's k by their weights, in their order, and `beside`. residual:
    is added to, and returned."""
    (num_tokens, top_k), hidden = weights.shape, results.shape[1]
    out = results.new_empty(num_tokens, hidden) if residual is None else residual
    if out.stride(1) != 1:
        raise ValueError(f"experts add to rows that are contiguous, got strides {out.stride()}: call contiguous()")
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(num_tokens, triton.cdiv(hidden, block))](
        results, weights, out if beside is None else beside, out, hidden, 0 if beside is None else beside.stride(0),
        out.stride(0), TOP_K=top_k, BESIDE=beside is not None, ADD=residual is not None, BLOCK=block, num_warps=4,
        **pdl_options(out, num_tokens),
    )  # fmt: skip
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: Order,
    n: int,
    top_k: int,
    tile: MoeTile,
    num_tokens: int,
    low: LowRows | None,
    *,
    gated: bool,
    limit: float,
) -> None:
    """x: row pair // top_k is a pair's → out [pairs, n]."""
    k = x.shape[1]
    _expert_kernel[(order.max_blocks * triton.cdiv(n, tile.block_n),)](
        x, weight, weight if bias is None else bias, out, order.pairs, order.experts, order.num_blocks,
        out.shape[0], order.max_blocks, weight.shape[0], n, k, x.stride(0), weight.stride(0), weight.stride(1),
        0 if bias is None else bias.stride(0), limit,
        TOP_K=top_k, GATED=gated, ACT=kind_of(limit), HAS_BIAS=bias is not None, SORTED=order.sort,
        EVEN_K=k % tile.block_k == 0, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP=tile.group, SHORT=tile.short if order.sort else 0, STAGES=tile.stages, num_warps=tile.warps,
        **lora_arguments(low, x), **pdl_options(x, num_tokens),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _expert_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, pairs_ptr, experts_ptr, num_blocks_ptr,
    num_pairs, max_blocks, num_experts, N, K, stride_x, stride_expert, stride_w, stride_bias, limit,
    h_ptr, b_ptr, slots_ptr, used_ptr, stride_slot, stride_b,
    TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SORTED: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SHORT: tl.constexpr, STAGES: tl.constexpr, LORA: tl.constexpr, RANK: tl.constexpr, SLOT_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[pair, n] = w[expert, n] · x[pair // TOP_K] + b; gated: of rows n and N + n, activated and multiplied; ACT
    3: squared, what is above 0. LORA:
    with what the adapters of rows add."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, tile, expert = place_of_program(
        experts_ptr, num_blocks_ptr, max_blocks, num_experts, tl.cdiv(N, BLOCK_N), GROUP, SORTED
    )
    if expert >= num_experts:
        return
    # Of an expert's last block few rows may be there: the first of them, and so fewer columns for the tensor cores.
    few: tl.constexpr = False
    some: tl.constexpr = False
    if SHORT > 0:
        few = tl.load(pairs_ptr + block * BLOCK_M + SHORT) >= num_pairs
        if 2 * SHORT < BLOCK_M:
            some = tl.load(pairs_ptr + block * BLOCK_M + 2 * SHORT) >= num_pairs
    if few:
        _multiply(
            x_ptr, w_ptr, bias_ptr, out_ptr, pairs_ptr, block, tile, expert, num_pairs, N, K, stride_x,
            stride_expert, stride_w, stride_bias, limit, h_ptr, b_ptr, slots_ptr, used_ptr, stride_slot, stride_b,
            TOP_K, GATED, ACT, HAS_BIAS, SORTED, EVEN_K, BLOCK_M, SHORT, BLOCK_N, BLOCK_K, STAGES, LORA, RANK,
            SLOT_K,
        )  # fmt: skip
    elif some:
        _multiply(
            x_ptr, w_ptr, bias_ptr, out_ptr, pairs_ptr, block, tile, expert, num_pairs, N, K, stride_x,
            stride_expert, stride_w, stride_bias, limit, h_ptr, b_ptr, slots_ptr, used_ptr, stride_slot, stride_b,
            TOP_K, GATED, ACT, HAS_BIAS, SORTED, EVEN_K, BLOCK_M, 2 * SHORT, BLOCK_N, BLOCK_K, STAGES, LORA, RANK,
            SLOT_K,
        )  # fmt: skip
    else:
        _multiply(
            x_ptr, w_ptr, bias_ptr, out_ptr, pairs_ptr, block, tile, expert, num_pairs, N, K, stride_x,
            stride_expert, stride_w, stride_bias, limit, h_ptr, b_ptr, slots_ptr, used_ptr, stride_slot, stride_b,
            TOP_K, GATED, ACT, HAS_BIAS, SORTED, EVEN_K, BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, LORA, RANK,
            SLOT_K,
        )  # fmt: skip


@triton.jit
def _multiply(
    x_ptr, w_ptr, bias_ptr, out_ptr, pairs_ptr, block, tile, expert, num_pairs, N, K, stride_x,
    stride_expert, stride_w, stride_bias, limit, h_ptr, b_ptr, slots_ptr, used_ptr, stride_slot, stride_b,
    TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SORTED: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, LORA: tl.constexpr, RANK: tl.constexpr, SLOT_K: tl.constexpr,
):  # fmt: skip
    """The first ROWS of the block."""
    pair = pairs_of_block(pairs_ptr, block, num_pairs, BLOCK_M, ROWS, SORTED)
    row_exists = pair < num_pairs
    row = tl.where(row_exists, pair // TOP_K, 0).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    near = tl.minimum(n, N - 1).to(tl.int64)  # rows past the end read the last one again
    x_ptrs = x_ptr + row[None, :] * stride_x + k[:, None]
    w_ptrs = w_ptr + expert * stride_expert + near[:, None] * stride_w + k[None, :]
    up_ptrs = w_ptrs + N.to(tl.int64) * stride_w
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=row_exists[None, :], other=0.0)
            w = tl.load(w_ptrs + start)
        else:
            rest = k < K - start
            x = tl.load(x_ptrs + start, mask=row_exists[None, :] & rest[:, None], other=0.0)
            w = tl.load(w_ptrs + start, mask=rest[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            if EVEN_K:
                w_up = tl.load(up_ptrs + start)
            else:
                w_up = tl.load(up_ptrs + start, mask=(k < K - start)[None, :], other=0.0)
            up = tl.dot(w_up, x, up, input_precision="ieee")
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * stride_bias + near
        acc += tl.load(bias_ptrs).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptrs + N).to(tl.float32)[:, None]
    if LORA:
        slot = slots_of_pairs(slots_ptr, used_ptr, pair, row_exists, SLOT_K)
        PARTS: tl.constexpr = 2 if GATED else 1
        b_ptr += expert * stride_b
        acc = plus_lora(acc, h_ptr, b_ptr, slot, pair, near, 0, stride_slot, PARTS, RANK)
        if GATED:
            up = plus_lora(up, h_ptr, b_ptr, slot, pair, near + N, 1, stride_slot, PARTS, RANK)
    if GATED:
        acc = activated(acc, up, limit, ACT)
    elif ACT == 3:
        acc = tl.maximum(acc, 0.0)
        acc *= acc
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_exists[None, :] & (n < N)[:, None])


@triton.jit
def _sum_kernel(
    results_ptr, weights_ptr, beside_ptr, out_ptr, size, stride_beside, stride_out,
    TOP_K: tl.constexpr, BESIDE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        weight = tl.load(weights_ptr + pair)
        end = tl.where(weight != 0.0, size, 0)  # what another rank has was not written
        result = tl.load(results_ptr + pair * size + column, mask=column < end, other=0.0)
        total += weight * result.to(tl.float32)
    if BESIDE:
        total += tl.load(beside_ptr + token * stride_beside + column, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + token * stride_out + column
    if ADD:
        total += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
