"""Mamba-2 of rows that decode, in one kernel: convolution, pending folds, outputs, the ring.

As in delta_decode, a program has a few columns of one head's state, and makes B and C of its group anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .delta_parts import own_sum, own_tile, ring_sum, ring_tile, silu, softplus, weight_tile
from .step import StateStep

# Of a state that a program has in registers, by the bytes of an element as it is stored; as delta nets were measured.
NUMBERS = {4: 2048, 2: 4096}
NARROW = 2048  # with drafts, whose states stand beside the folded one


@dataclass(frozen=True)
class ScanWeights:
    """Of a layer: those of the convolution [C, W] and its bias [C] or None, of any float dtype; A_log, D and dt_bias
    fp32 [H]; the limits of Δ."""

    conv: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    limits: tuple[float, float] = (0.0, float("inf"))


def has_tiles(rows: int, columns: int) -> bool:
    """Whether a program can have some columns of a head's state [rows, columns], which Triton wants to be powers of
    two, and products of prompts at least 16 of."""
    return rows >= 16 and not rows & (rows - 1) and columns > 0 and not columns % 16


def widest_tile(columns: int, most: int) -> int:
    """Columns of a program: a power of two that divides all of them, as is `most`."""
    return min(columns & -columns, most)


def scan_decode(
    raw: Tensor, dt: Tensor, weights: ScanWeights, ring: Tensor, state: Tensor, step: StateStep, num_groups: int,
    out: Tensor,
) -> None:  # fmt: skip
    """The step's decode rows, as `scan` says; into out [T, H, P], contiguous."""
    rows = step.num_decode_rows
    if not rows:
        return
    _, heads, size, columns = state.shape
    numbers = NUMBERS[state.element_size()] if step.decode_query_len == 1 else NARROW
    block = widest_tile(columns, max(8, numbers // size))
    conv, bias = weights.conv, weights.conv_bias
    _scan_decode_kernel[(columns // block, heads, rows)](
        raw, dt, conv, conv if bias is None else bias, weights.A_log, weights.D, weights.dt_bias, ring, state, out,
        step.slots, step.start, step.state_len, step.snap_at, step.snap_slot, step.query_start,
        raw.stride(0), dt.stride(0), *weights.limits,
        GROUPS=num_groups, HEADS=heads, N=size, P=columns, COLUMNS=block, WIDTH=conv.shape[1], RING=ring.shape[1],
        TAPS=triton.next_power_of_2(conv.shape[1]), QUERY_LEN=step.decode_query_len, BIAS=bias is not None,
        num_warps=2 if size > 128 else 1, **pdl_options(raw, rows * step.decode_query_len),
    )  # fmt: skip


@triton.jit
def conv_bias_of(bias_ptr, channels, BIAS: tl.constexpr):
    """The convolution's bias of these channels in fp32, zeros where it has none."""
    if BIAS:
        return tl.load(bias_ptr + channels).to(tl.float32)
    else:
        return tl.zeros(channels.shape, tl.float32)


@triton.jit
def fold_pending(
    state, first, end, ring_ptr, conv_ptr, conv_bias_ptr, values, keys, rate, dt_bias, least, most, head,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The state [N, columns] after the positions first … end - 1, whose inputs are in the ring. values: channels of x,
    keys: of B."""
    ROW: tl.constexpr = CHANNELS + HEADS
    for position in range(first, end):
        weight = weight_tile(conv_ptr, keys, WIDTH, TAPS)
        b = tl.sum(ring_tile(ring_ptr, keys, position + 1, end, ROW, WIDTH, RING, TAPS) * weight, 0)
        x = ring_sum(ring_ptr, conv_ptr, values, position + 1, end, ROW, WIDTH, RING)
        time = tl.load(ring_ptr + (position & (RING - 1)) * ROW + CHANNELS + head)
        delta = tl.minimum(tl.maximum(softplus(time.to(tl.float32) + dt_bias), least), most)
        moved = silu(x + conv_bias_of(conv_bias_ptr, values, BIAS)) * delta
        b = silu(b + conv_bias_of(conv_bias_ptr, keys, BIAS))
        state = state * tl.exp(-rate * delta) + b[:, None] * moved[None, :]
    return state


@triton.jit
def _scan_decode_kernel(
    raw_ptr, dt_ptr, conv_ptr, conv_bias_ptr, a_log_ptr, d_ptr, dt_bias_ptr, ring_ptr, state_ptr, out_ptr,
    slots_ptr, start_ptr, state_len_ptr, snap_at_ptr, snap_slot_ptr, query_start_ptr,
    raw_token, dt_token, least, most,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr, QUERY_LEN: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
    ROW: tl.constexpr = CHANNELS + HEADS
    group = head // (HEADS // GROUPS)
    values = head * P + tile * COLUMNS + tl.arange(0, COLUMNS)
    keys = HEADS * P + group * N + tl.arange(0, N)
    queries = GROUPS * N + keys
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    skip = tl.load(d_ptr + head).to(tl.float32)

    # As delta_decode has it: what is pending is folded while the kernel before this one still runs.
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row)
    is_padding = (slot == 0) | (tl.load(query_start_ptr + row + 1) == token)
    start = tl.load(start_ptr + row)
    length = tl.where(is_padding, start, tl.load(state_len_ptr + row))
    snap_at = tl.load(snap_at_ptr + row)
    snaps = (length < snap_at) & (snap_at <= start)
    own_ring = ring_ptr + slot * (RING * ROW)
    inside = head * (N * P) + tl.arange(0, N)[:, None] * P + tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    state_place = state_ptr + slot * (HEADS * N * P) + inside
    state = tl.load(state_place, mask=(length > 0) & (inside >= 0), other=0.0).to(tl.float32)
    early_c = ring_tile(own_ring, queries, start + 1, start, ROW, WIDTH, RING, TAPS)
    early_b = ring_tile(own_ring, keys, start + 1, start, ROW, WIDTH, RING, TAPS)
    early_x = ring_sum(own_ring, conv_ptr, values, start + 1, start, ROW, WIDTH, RING)
    first_end = tl.where(snaps, snap_at, start)
    state = fold_pending(
        state, length, first_end, own_ring, conv_ptr, conv_bias_ptr, values, keys, rate, dt_bias, least, most, head,
        CHANNELS, HEADS, WIDTH, RING, TAPS, BIAS,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    if is_padding:
        return

    # Of the channels that several programs read, one of them writes the ring.
    writes_keys = (tile == 0) & (head % (HEADS // GROUPS) == 0)
    if snaps:
        snap_slot = tl.load(snap_slot_ptr + row).to(tl.int64)
        tl.store(state_ptr + snap_slot * (HEADS * N * P) + inside, state.to(state_ptr.dtype.element_ty))
        for back in tl.static_range(1, WIDTH):
            place = ((snap_at - back) & (RING - 1)) * ROW
            target = ring_ptr + snap_slot * (RING * ROW) + place
            tl.store(target + values, tl.load(own_ring + place + values))
            tl.store(target + queries, tl.load(own_ring + place + queries), mask=writes_keys & (queries >= 0))
            tl.store(target + keys, tl.load(own_ring + place + keys), mask=writes_keys & (keys >= 0))
        state = fold_pending(
            state, snap_at, start, own_ring, conv_ptr, conv_bias_ptr, values, keys, rate, dt_bias, least, most, head,
            CHANNELS, HEADS, WIDTH, RING, TAPS, BIAS,
        )  # fmt: skip
    if start > length:
        tl.store(state_place, state.to(state_ptr.dtype.element_ty))

    raw_ptr += token.to(tl.int64) * raw_token
    dt_ptr += token.to(tl.int64) * dt_token
    out_ptr += (token.to(tl.int64) * HEADS + head) * P + tile * COLUMNS + tl.arange(0, COLUMNS)
    for at in tl.static_range(QUERY_LEN):
        stop = start + at + 1
        if at > 0:
            early_c = ring_tile(own_ring, queries, stop, start, ROW, WIDTH, RING, TAPS)
            early_b = ring_tile(own_ring, keys, stop, start, ROW, WIDTH, RING, TAPS)
            early_x = ring_sum(own_ring, conv_ptr, values, stop, start, ROW, WIDTH, RING)
        inputs = early_c + own_tile(raw_ptr, raw_token, queries, stop, start, WIDTH, TAPS)
        c = tl.sum(inputs * weight_tile(conv_ptr, queries, WIDTH, TAPS), 0)
        c = silu(c + conv_bias_of(conv_bias_ptr, queries, BIAS))
        inputs = early_b + own_tile(raw_ptr, raw_token, keys, stop, start, WIDTH, TAPS)
        b = tl.sum(inputs * weight_tile(conv_ptr, keys, WIDTH, TAPS), 0)
        b = silu(b + conv_bias_of(conv_bias_ptr, keys, BIAS))
        x = early_x + own_sum(raw_ptr, raw_token, conv_ptr, values, stop, start, WIDTH)
        x = silu(x + conv_bias_of(conv_bias_ptr, values, BIAS))
        time = tl.load(dt_ptr + at * dt_token + head)
        delta = tl.minimum(tl.maximum(softplus(time.to(tl.float32) + dt_bias), least), most)
        decay = tl.exp(-rate * delta)
        # Sᵀ C after the fold, of the state before it: the last token's needs no other state.
        output = decay * tl.sum(state * c[:, None], 0) + (tl.sum(b * c, 0) * delta + skip) * x
        if at + 1 < QUERY_LEN:
            state = state * decay + b[:, None] * (delta * x)[None, :]
        tl.store(out_ptr + at * (HEADS * P), output.to(out_ptr.dtype.element_ty))

        place = own_ring + ((start + at) & (RING - 1)) * ROW
        tl.store(place + values, tl.load(raw_ptr + at * raw_token + values))
        tl.store(place + queries, tl.load(raw_ptr + at * raw_token + queries), mask=writes_keys & (queries >= 0))
        tl.store(place + keys, tl.load(raw_ptr + at * raw_token + keys), mask=writes_keys & (keys >= 0))
        tl.store(place + CHANNELS + head, time, mask=tile == 0)
