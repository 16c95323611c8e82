"""Low-rank adapters of experts: of each row's adapter and expert, B A x is added to both products of a mixture.

Rows come in the blocks that the experts' own products have (moe_blocks.py). A block's rows may have several adapters:
each that is there is multiplied by all of them, and added where it belongs. First h = A x (`low_rows`), then the
products add B h to their sums before these are rounded (`plus_lora`). Rows without an adapter keep their bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .moe_blocks import Order, pairs_of_block, place_of_program

NO_SLOT = tl.constexpr(1 << 30)  # behind all others


class ExpertPairs(NamedTuple):
    """Of one product, in all slots. Zeros lie behind the rank of an adapter, R is that of the slots."""

    a: Tensor  # [slots, E, parts · R, K]: of gate and up, or of down alone
    b: Tensor  # [slots, E, parts · N, R]
    used: Tensor  # int32 [slots]: 0 where an adapter has nothing here, and so nothing is computed


class ExpertLora(NamedTuple):
    gate_up: ExpertPairs
    down: ExpertPairs
    slots: Tensor  # int32 [T]: where each token's adapter is; negative: it has none


def add_of_expert(y: Tensor, x: Tensor, expert: int, pairs: ExpertPairs, slots: Tensor) -> Tensor:
    """y [n, parts · N] += B A x, in place, for the rows x [n, K] of one expert and their slots [n]: the plain way."""
    for slot in slots.unique().tolist():
        if slot < 0 or not pairs.used[slot]:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        a, b = pairs.a[slot, expert].float(), pairs.b[slot, expert].float()
        low = (x[rows].float() @ a.T).split(b.shape[1], dim=1)
        delta = [part @ matrix.T for part, matrix in zip(low, b.chunk(len(low)), strict=True)]
        y[rows] = (y[rows].float() + torch.cat(delta, dim=1)).to(y.dtype)
    return y


# ---- Triton ----
class LowRows(NamedTuple):
    """What `plus_lora` needs of one product."""

    h: Tensor  # fp32 [pairs, parts · R]; undefined where a pair has no adapter, or its expert is another rank's
    pairs: ExpertPairs
    slots: Tensor
    top_k: int


def low_rows(
    x: Tensor, lora: ExpertLora | None, product: str, order: Order, top_k: int, block_m: int
) -> LowRows | None:
    """h = A x of "gate_up", for x [T, K], or "down", x [T · k, K]; None where there is no lora."""
    if lora is None:
        return None
    pairs = lora.gate_up if product == "gate_up" else lora.down
    (_, num_experts, n, k), num_tokens = pairs.a.shape, len(lora.slots)
    if len(x) != num_tokens * (1 if product == "gate_up" else top_k):
        raise ValueError(f"{len(x)} rows for {product} of {num_tokens} tokens that go to {top_k} experts each")
    if x.stride(1) != 1 or not pairs.a[0].is_contiguous() or not pairs.b[0].is_contiguous() or pairs.b.shape[3] % 16:
        raise ValueError("the last dimension of x and each slot must be contiguous, and the rank a multiple of 16")
    h = torch.empty((num_tokens * top_k, n), dtype=torch.float32, device=x.device)
    block_n, block_k = min(64, max(16, triton.next_power_of_2(n))), 128 if block_m <= 32 else 64
    _low_kernel[(order.max_blocks * triton.cdiv(n, block_n),)](
        x, pairs.a, h, lora.slots, pairs.used, order.pairs, order.experts, order.num_blocks,
        len(h), order.max_blocks, num_experts, n, k, x.stride(0), pairs.a.stride(0), pairs.a.stride(1),
        TOP_K=top_k if product == "gate_up" else 1, SLOT_K=top_k, SORTED=order.sort, EVEN_K=k % block_k == 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3, **pdl_options(x, num_tokens),
    )  # fmt: skip
    return LowRows(h, pairs, lora.slots, top_k)


def lora_arguments(low: LowRows | None, like: Tensor) -> dict[str, Any]:
    """Of the experts' kernels, by name. like: what stands where there is nothing."""
    if low is None:
        return {
            "h_ptr": like, "b_ptr": like, "slots_ptr": like, "used_ptr": like, "stride_slot": 0, "stride_b": 0,
            "LORA": False, "RANK": 16, "SLOT_K": 1,
        }  # fmt: skip
    b = low.pairs.b
    return {
        "h_ptr": low.h, "b_ptr": b, "slots_ptr": low.slots, "used_ptr": low.pairs.used, "stride_slot": b.stride(0),
        "stride_b": b.stride(1), "LORA": True, "RANK": b.shape[3], "SLOT_K": low.top_k,
    }  # fmt: skip


@triton.jit
def slots_of_pairs(slots_ptr, used_ptr, pair, row_exists, SLOT_K: tl.constexpr):
    """int32 [BLOCK_M]; NO_SLOT where nothing is to be added."""
    slot = tl.load(slots_ptr + pair // SLOT_K, mask=row_exists, other=-1)
    used = tl.load(used_ptr + slot, mask=slot >= 0, other=0)
    return tl.where(used != 0, slot, NO_SLOT)


@triton.jit
def next_slot(slot, last):
    """The lowest of a block's slots behind the last one; NO_SLOT: there are no more."""
    return tl.min(tl.where(slot > last, slot, NO_SLOT))


@triton.jit
def plus_lora(acc, h_ptr, b_ptr, slot, pair, n, part, stride_slot, PARTS: tl.constexpr, RANK: tl.constexpr):
    """acc [N, M] + B h: of rows n of the B at b_ptr + slot · stride_slot, and the h of this part."""
    BLOCK_R: tl.constexpr = 16 if RANK % 32 else 32
    r = tl.arange(0, BLOCK_R)
    h_ptrs = h_ptr + pair.to(tl.int64)[None, :] * (PARTS * RANK) + part * RANK + r[:, None]
    b_ptrs = b_ptr + n.to(tl.int64)[:, None] * RANK + r[None, :]
    current = next_slot(slot, -1)
    while current < NO_SLOT:
        mine = (slot == current)[None, :]
        delta = tl.zeros(acc.shape, tl.float32)
        for at in tl.static_range(0, RANK, BLOCK_R):
            b = tl.load(b_ptrs + current.to(tl.int64) * stride_slot + at)
            h = tl.load(h_ptrs + at, mask=mine, other=0.0)
            delta = tl.dot(b, h.to(b.dtype), delta, input_precision="ieee")
        acc = tl.where(mine, acc + delta, acc)
        current = next_slot(slot, current)
    return acc


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _low_kernel(
    x_ptr, a_ptr, h_ptr, slots_ptr, used_ptr, pairs_ptr, experts_ptr, num_blocks_ptr,
    num_pairs, max_blocks, num_experts, N, K, stride_x, stride_slot, stride_expert,
    TOP_K: tl.constexpr, SLOT_K: tl.constexpr, SORTED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[pair, n] = a[slot of the pair, expert, n] · x[pair // TOP_K]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, tile, expert = place_of_program(
        experts_ptr, num_blocks_ptr, max_blocks, num_experts, tl.cdiv(N, BLOCK_N), 1, SORTED
    )
    if expert >= num_experts:
        return
    pair = pairs_of_block(pairs_ptr, block, num_pairs, BLOCK_M, BLOCK_M, SORTED)
    slot = slots_of_pairs(slots_ptr, used_ptr, pair, pair < num_pairs, SLOT_K)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(n, N - 1)  # rows past the end read the last one again
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[None, :] * stride_x + k[:, None]
    a_ptrs = a_ptr + expert * stride_expert + near.to(tl.int64)[:, None] * K + k[None, :]
    h_ptrs = h_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
    current = next_slot(slot, -1)
    while current < NO_SLOT:
        mine = (slot == current)[None, :]
        mine_ptrs = a_ptrs + current.to(tl.int64) * stride_slot
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, K, BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs + start, mask=mine, other=0.0)
                a = tl.load(mine_ptrs + start)
            else:
                rest = k < K - start
                x = tl.load(x_ptrs + start, mask=mine & rest[:, None], other=0.0)
                a = tl.load(mine_ptrs + start, mask=rest[None, :], other=0.0)
            acc = tl.dot(a.to(x.dtype), x, acc, input_precision="ieee")
        tl.store(h_ptrs, acc, mask=mine & (n < N)[:, None])
        current = next_slot(slot, current)
