"""Delta nets of prompts: the pass of each row's states over its chunks, which gives the outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_chunk import solve_chunks
from .delta_parts import CHUNK, fold_pending
from .short_conv import convolve_heads
from .step import StateStep

# Of a program. On an H100, 8192 tokens with 32 heads: 630 µs, 734 with two stages, 783 with 64 columns.
COLUMNS, WARPS = 32, 4
STAGES = {2: 3, 4: 2}  # by the bytes of an element: three of float32 do not fit a multiprocessor


def delta_prompts(
    raw: Tensor, gates: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, ring: Tensor, state: Tensor,
    step: StateStep, num_key_heads: int, out: Tensor,
) -> None:  # fmt: skip
    """The rows of a step without decode rows, as `delta_net` says, but for the ring, which is only read; into out
    [T, Hv, V], contiguous."""
    _, heads, key_dim, value_dim = state.shape
    tokens = len(raw)
    if not step.num_rows or not tokens:
        return
    keys = torch.empty(tokens, 2 * num_key_heads * key_dim, dtype=raw.dtype, device=raw.device)
    convolve_heads(raw, conv_weight, ring, step, key_dim, keys, out.view(tokens, heads * value_dim))
    weights = torch.empty(tokens, heads, key_dim, dtype=raw.dtype, device=raw.device)
    shares = torch.empty(tokens, heads, CHUNK, dtype=raw.dtype, device=raw.device)
    decays = torch.empty(tokens, heads, dtype=torch.float32, device=raw.device)
    solve_chunks(keys, out, gates, A_log, dt_bias, step, weights, shares, decays)
    columns = min(COLUMNS, value_dim)
    _pass_kernel[(value_dim // columns, heads, step.num_rows)](
        keys, out, weights, shares, decays, conv_weight, A_log, dt_bias, ring, state,
        step.slots, step.start, step.state_len, step.fold_to, step.snap_at, step.snap_slot, step.query_start,
        key_dim**-0.5,
        KEY_HEADS=num_key_heads, HEADS=heads, K=key_dim, V=value_dim, COLUMNS=columns, WIDTH=conv_weight.shape[1],
        RING=ring.shape[1], TAPS=triton.next_power_of_2(conv_weight.shape[1]), CHUNK=CHUNK,
        num_warps=WARPS, num_stages=STAGES[raw.element_size()],
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "slots_ptr", "start_ptr", "state_len_ptr", "fold_to_ptr", "snap_at_ptr", "snap_slot_ptr", "query_start_ptr"
    ]
)  # fmt: skip
def _pass_kernel(
    keys_ptr, values_ptr, weights_ptr, shares_ptr, decays_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, ring_ptr, state_ptr,
    slots_ptr, start_ptr, state_len_ptr, fold_to_ptr, snap_at_ptr, snap_slot_ptr, query_start_ptr, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token, end = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    if (slot == 0) | (token == end):
        return
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    start, length = tl.load(start_ptr + row), tl.load(state_len_ptr + row)
    fold_to = tl.load(fold_to_ptr + row)
    snap_at = tl.load(snap_at_ptr + row)
    snap_at = tl.where((length < snap_at) & (snap_at <= fold_to), snap_at, -1)
    key_head = head // (HEADS // KEY_HEADS)
    key, column, index = tl.arange(0, K), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)

    inside = head * (K * V) + key[:, None] * V + column[None, :]
    state_place = state_ptr + slot * (HEADS * K * V) + inside
    snap_slot = tl.load(snap_slot_ptr + row).to(tl.int64)
    snap_place = state_ptr + snap_slot * (HEADS * K * V) + inside
    state = tl.load(state_place, mask=(length > 0) & (inside >= 0), other=0.0).to(tl.float32)
    if length < start:
        rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        own_ring = ring_ptr + slot * (RING * (CHANNELS + 2 * HEADS))
        keys = (KEY_HEADS + key_head) * K + key
        values = 2 * KEY_HEADS * K + head * V + column
        middle = tl.where((snap_at > 0) & (snap_at <= start), snap_at, start)
        state = fold_pending(
            state,
            length,
            middle,
            own_ring,
            conv_ptr,
            keys,
            values,
            rate,
            bias,
            head,
            CHANNELS,
            HEADS,
            WIDTH,
            RING,
            TAPS,
        )
        if snap_at == middle:
            tl.store(snap_place, state.to(state_ptr.dtype.element_ty))
        state = fold_pending(
            state, middle, start, own_ring, conv_ptr, keys, values, rate, bias, head, CHANNELS, HEADS, WIDTH, RING, TAPS
        )

    base = token.to(tl.int64) - start
    behind = start + end - token
    first_chunk, last_chunk = start // CHUNK, (behind + CHUNK - 1) // CHUNK
    for chunk in range(first_chunk, last_chunk):
        position = tl.maximum(start, chunk * CHUNK)
        count = tl.minimum(behind, chunk * CHUNK + CHUNK) - position
        tokens = base + position + index
        present = index < count
        heads = tokens * HEADS + head
        total = tl.load(decays_ptr + heads, mask=present, other=0.0)
        place = weights_ptr + heads[:, None] * K + key[None, :]
        w = tl.load(place, mask=present[:, None], other=0.0)
        place = keys_ptr + tokens[:, None] * (2 * KEY_HEADS * K) + key_head * K + key[None, :]
        q = tl.load(place, mask=present[:, None], other=0.0)
        k = tl.load(place + KEY_HEADS * K, mask=present[:, None], other=0.0)
        place = shares_ptr + heads[:, None] * CHUNK + index[None, :]
        share = tl.load(place, mask=present[:, None], other=0.0)
        place = values_ptr + heads[:, None] * V + column[None, :]
        u = tl.load(place, mask=present[:, None], other=0.0).to(tl.float32)

        before = state.to(dtype)
        new = u - tl.dot(w, before, input_precision="ieee")
        output = tl.dot(q, before, input_precision="ieee") * (tl.exp(total) * scale)[:, None]
        output = tl.dot(share, new.to(dtype), output, input_precision="ieee")
        tl.store(place, output.to(dtype), mask=present[:, None])

        num_folded = tl.minimum(fold_to - position, count)
        left = tl.sum(tl.where(index == num_folded - 1, total, 0.0), 0)
        new *= tl.where(index < num_folded, tl.exp(tl.minimum(left - total, 0.0)), 0.0)[:, None]
        state = tl.dot(tl.trans(k), new.to(dtype), state * tl.exp(left), input_precision="ieee")
        if position + count == snap_at:
            tl.store(snap_place, state.to(state_ptr.dtype.element_ty))
    tl.store(state_place, state.to(state_ptr.dtype.element_ty))
