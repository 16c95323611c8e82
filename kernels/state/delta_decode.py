"""Delta nets of rows that decode, in one kernel: convolution, norms and gates, pending folds, outputs, the ring.

A program has a few columns of one head's state, which it reads once and writes once, and everything else that it needs
is small: queries and keys are made again by every program that shares them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .delta_parts import (
    fold_pending,
    log_decay,
    own_sum,
    own_tile,
    ring_sum,
    ring_tile,
    sigmoid,
    silu,
    unit,
    weight_tile,
)
from .step import StateStep

# Of a program: columns by the bytes of a state's element, and warps. On an H100, 256 rows of 32 heads: in float32
# 490 µs, 555 with 32 columns, 582 with 32 and two warps; in float16 276 with 32 columns, 421 with 16.
COLUMNS, WARPS = {4: 16, 2: 32}, 1
NARROW = 16  # with drafts, whose states stand beside the folded one: more columns spill registers


def delta_decode(
    raw: Tensor, gates: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, ring: Tensor, state: Tensor,
    step: StateStep, num_key_heads: int, out: Tensor,
) -> None:  # fmt: skip
    """The step's decode rows, as `delta_net` says; into out [T, Hv, V], contiguous."""
    rows = step.num_decode_rows
    if not rows:
        return
    _, heads, key_dim, value_dim = state.shape
    columns = COLUMNS[state.element_size()] if step.decode_query_len == 1 else NARROW
    columns = min(columns, value_dim)
    _delta_decode_kernel[(value_dim // columns, heads, rows)](
        raw, gates, conv_weight, A_log, dt_bias, ring, state, out,
        step.slots, step.start, step.state_len, step.snap_at, step.snap_slot, step.query_start,
        raw.stride(0), gates.stride(0), key_dim**-0.5,
        KEY_HEADS=num_key_heads, HEADS=heads, K=key_dim, V=value_dim, COLUMNS=columns, WIDTH=conv_weight.shape[1],
        RING=ring.shape[1], TAPS=triton.next_power_of_2(conv_weight.shape[1]), QUERY_LEN=step.decode_query_len,
        num_warps=WARPS, **pdl_options(raw, rows * step.decode_query_len),
    )  # fmt: skip


@triton.jit
def _delta_decode_kernel(
    raw_ptr, gates_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, ring_ptr, state_ptr, out_ptr,
    slots_ptr, start_ptr, state_len_ptr, snap_at_ptr, snap_slot_ptr, query_start_ptr,
    raw_token, gates_token, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr, QUERY_LEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    ROW: tl.constexpr = CHANNELS + 2 * HEADS
    key_head = head // (HEADS // KEY_HEADS)
    queries = key_head * K + tl.arange(0, K)
    keys = KEY_HEADS * K + queries
    values = 2 * KEY_HEADS * K + head * V + tile * COLUMNS + tl.arange(0, COLUMNS)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    # States and rings were written by the step before, at the latest, and a plain launch stands between: what is
    # pending is folded while the kernel before this one, the projection of the step's tokens, still runs.
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row)
    is_padding = (slot == 0) | (tl.load(query_start_ptr + row + 1) == token)
    start = tl.load(start_ptr + row)
    length = tl.where(is_padding, start, tl.load(state_len_ptr + row))
    snap_at = tl.load(snap_at_ptr + row)
    snaps = (length < snap_at) & (snap_at <= start)
    own_ring = ring_ptr + slot * (RING * ROW)
    inside = head * (K * V) + tl.arange(0, K)[:, None] * V + tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    state_place = state_ptr + slot * (HEADS * K * V) + inside
    state = tl.load(state_place, mask=(length > 0) & (inside >= 0), other=0.0).to(tl.float32)
    early_q = ring_tile(own_ring, queries, start + 1, start, ROW, WIDTH, RING, TAPS)
    early_k = ring_tile(own_ring, keys, start + 1, start, ROW, WIDTH, RING, TAPS)
    early_v = ring_sum(own_ring, weight_ptr, values, start + 1, start, ROW, WIDTH, RING)
    first_end = tl.where(snaps, snap_at, start)
    state = fold_pending(
        state, length, first_end, own_ring, weight_ptr, keys, values, rate, bias, head,
        CHANNELS, HEADS, WIDTH, RING, TAPS,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    if is_padding:
        return

    # Of the channels that several programs read, one of them writes the ring.
    writes_keys = (tile == 0) & (head % (HEADS // KEY_HEADS) == 0)
    if snaps:
        snap_slot = tl.load(snap_slot_ptr + row).to(tl.int64)
        tl.store(state_ptr + snap_slot * (HEADS * K * V) + inside, state.to(state_ptr.dtype.element_ty))
        for back in tl.static_range(1, WIDTH):
            place = ((snap_at - back) & (RING - 1)) * ROW
            target = ring_ptr + snap_slot * (RING * ROW) + place
            tl.store(target + values, tl.load(own_ring + place + values))
            tl.store(target + queries, tl.load(own_ring + place + queries), mask=writes_keys & (queries >= 0))
            tl.store(target + keys, tl.load(own_ring + place + keys), mask=writes_keys & (keys >= 0))
        state = fold_pending(
            state, snap_at, start, own_ring, weight_ptr, keys, values, rate, bias, head,
            CHANNELS, HEADS, WIDTH, RING, TAPS,
        )  # fmt: skip
    if start > length:
        tl.store(state_place, state.to(state_ptr.dtype.element_ty))

    raw_ptr += token.to(tl.int64) * raw_token
    gates_ptr += token.to(tl.int64) * gates_token
    out_ptr += (token.to(tl.int64) * HEADS + head) * V + tile * COLUMNS + tl.arange(0, COLUMNS)
    for at in tl.static_range(QUERY_LEN):
        stop = start + at + 1
        if at > 0:
            early_q = ring_tile(own_ring, queries, stop, start, ROW, WIDTH, RING, TAPS)
            early_k = ring_tile(own_ring, keys, stop, start, ROW, WIDTH, RING, TAPS)
            early_v = ring_sum(own_ring, weight_ptr, values, stop, start, ROW, WIDTH, RING)
        inputs = early_q + own_tile(raw_ptr, raw_token, queries, stop, start, WIDTH, TAPS)
        q = unit(silu(tl.sum(inputs * weight_tile(weight_ptr, queries, WIDTH, TAPS), 0))) * scale
        inputs = early_k + own_tile(raw_ptr, raw_token, keys, stop, start, WIDTH, TAPS)
        k = unit(silu(tl.sum(inputs * weight_tile(weight_ptr, keys, WIDTH, TAPS), 0)))
        v = silu(early_v + own_sum(raw_ptr, raw_token, weight_ptr, values, stop, start, WIDTH))
        b = tl.load(gates_ptr + at * gates_token + head)
        a = tl.load(gates_ptr + at * gates_token + HEADS + head)
        decay = tl.exp(log_decay(a, rate, bias))
        # Sᵀ q after the fold, of the state before it: the last token's needs no other state.
        delta = sigmoid(b) * (v - decay * tl.sum(state * k[:, None], 0))
        output = decay * tl.sum(state * q[:, None], 0) + tl.sum(k * q, 0) * delta
        if at + 1 < QUERY_LEN:
            state = state * decay + k[:, None] * delta[None, :]
        tl.store(out_ptr + at * (HEADS * V), output.to(out_ptr.dtype.element_ty))

        place = own_ring + ((start + at) & (RING - 1)) * ROW
        tl.store(place + values, tl.load(raw_ptr + at * raw_token + values))
        tl.store(place + queries, tl.load(raw_ptr + at * raw_token + queries), mask=writes_keys & (queries >= 0))
        tl.store(place + keys, tl.load(raw_ptr + at * raw_token + keys), mask=writes_keys & (keys >= 0))
        tl.store(place + CHANNELS + head, b, mask=tile == 0)
        tl.store(place + CHANNELS + HEADS + head, a, mask=tile == 0)
