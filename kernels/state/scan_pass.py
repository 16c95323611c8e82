"""Mamba-2 of prompts: the pass of each row's states over its chunks, which gives the outputs.

Nothing is solved within a chunk, as delta nets must, so that one kernel does it all behind the convolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_parts import CHUNK, softplus
from .scan_decode import ScanWeights, fold_pending, widest_tile
from .short_conv import short_conv_triton
from .step import StateStep

# Of a program: numbers of a state, and warps; four of them, or more numbers, spill registers.
NUMBERS, WARPS = 4096, 8
STAGES = {2: 2, 4: 1}  # by the bytes of an element: more do not fit a multiprocessor


def scan_prompts(
    raw: Tensor, dt: Tensor, weights: ScanWeights, ring: Tensor, state: Tensor, step: StateStep, num_groups: int,
    out: Tensor,
) -> None:  # fmt: skip
    """The rows of a step without decode rows, as `scan` says, but for the ring, which is only read; into out
    [T, H, P], contiguous."""
    _, heads, size, columns = state.shape
    if not step.num_rows or not len(raw):
        return
    conv, bias = weights.conv, weights.conv_bias
    mixed = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    short_conv_triton(raw, conv, ring, step, bias, "silu", out=mixed)
    block = widest_tile(columns, max(16, NUMBERS // size))
    _pass_kernel[(columns // block, heads, step.num_rows)](
        mixed, dt, conv, conv if bias is None else bias, weights.A_log, weights.D, weights.dt_bias, ring, state, out,
        step.slots, step.start, step.state_len, step.fold_to, step.snap_at, step.snap_slot, step.query_start,
        dt.stride(0), *weights.limits,
        GROUPS=num_groups, HEADS=heads, N=size, P=columns, COLUMNS=block, WIDTH=conv.shape[1], RING=ring.shape[1],
        TAPS=triton.next_power_of_2(conv.shape[1]), CHUNK=CHUNK, BIAS=bias is not None,
        num_warps=WARPS, num_stages=STAGES[raw.element_size()],
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "slots_ptr", "start_ptr", "state_len_ptr", "fold_to_ptr", "snap_at_ptr", "snap_slot_ptr", "query_start_ptr"
    ]
)  # fmt: skip
def _pass_kernel(
    mixed_ptr, dt_ptr, conv_ptr, conv_bias_ptr, a_log_ptr, d_ptr, dt_bias_ptr, ring_ptr, state_ptr, out_ptr,
    slots_ptr, start_ptr, state_len_ptr, fold_to_ptr, snap_at_ptr, snap_slot_ptr, query_start_ptr,
    dt_token, least, most,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token, end = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    if (slot == 0) | (token == end):
        return
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    start, length = tl.load(start_ptr + row), tl.load(state_len_ptr + row)
    fold_to = tl.load(fold_to_ptr + row)
    snap_at = tl.load(snap_at_ptr + row)
    snap_at = tl.where((length < snap_at) & (snap_at <= fold_to), snap_at, -1)
    group = head // (HEADS // GROUPS)
    line, column, index = tl.arange(0, N), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    values = head * P + column
    keys = HEADS * P + group * N + line
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    skip = tl.load(d_ptr + head).to(tl.float32)

    inside = head * (N * P) + line[:, None] * P + column[None, :]
    state_place = state_ptr + slot * (HEADS * N * P) + inside
    snap_place = state_ptr + tl.load(snap_slot_ptr + row).to(tl.int64) * (HEADS * N * P) + inside
    state = tl.load(state_place, mask=(length > 0) & (inside >= 0), other=0.0).to(tl.float32)
    if length < start:
        own_ring = ring_ptr + slot * (RING * (CHANNELS + HEADS))
        middle = tl.where((snap_at > 0) & (snap_at <= start), snap_at, start)
        state = fold_pending(
            state, length, middle, own_ring, conv_ptr, conv_bias_ptr, values, keys, rate, dt_bias, least, most,
            head, CHANNELS, HEADS, WIDTH, RING, TAPS, BIAS,
        )  # fmt: skip
        if snap_at == middle:
            tl.store(snap_place, state.to(state_ptr.dtype.element_ty))
        state = fold_pending(
            state, middle, start, own_ring, conv_ptr, conv_bias_ptr, values, keys, rate, dt_bias, least, most,
            head, CHANNELS, HEADS, WIDTH, RING, TAPS, BIAS,
        )  # fmt: skip

    base = token.to(tl.int64) - start
    behind = start + end - token
    first_chunk, last_chunk = start // CHUNK, (behind + CHUNK - 1) // CHUNK
    lower = index[:, None] >= index[None, :]
    for chunk in range(first_chunk, last_chunk):
        position = tl.maximum(start, chunk * CHUNK)
        count = tl.minimum(behind, chunk * CHUNK + CHUNK) - position
        tokens = base + position + index
        present = index < count
        time = tl.load(dt_ptr + tokens * dt_token + head, mask=present, other=0.0).to(tl.float32)
        delta = tl.minimum(tl.maximum(softplus(time + dt_bias), least), most)
        total = tl.cumsum(tl.where(present, -rate * delta, 0.0), 0)
        place = mixed_ptr + tokens[:, None] * CHANNELS
        x = tl.load(place + values[None, :], mask=present[:, None], other=0.0)
        b = tl.load(place + keys[None, :], mask=present[:, None], other=0.0)
        c = tl.load(place + GROUPS * N + keys[None, :], mask=present[:, None], other=0.0)
        moved = x.to(tl.float32) * delta[:, None]

        # Above the diagonal the exponent would be positive, without a bound.
        between = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
        share = tl.dot(c, tl.trans(b), input_precision="ieee") * between
        output = tl.dot(c, state.to(dtype), input_precision="ieee") * tl.exp(total)[:, None]
        output = tl.dot(share.to(dtype), moved.to(dtype), output, input_precision="ieee")
        output += skip * x.to(tl.float32)
        at = out_ptr + (tokens[:, None] * HEADS + head) * P + column[None, :]
        tl.store(at, output.to(dtype), mask=present[:, None])

        num_folded = tl.minimum(fold_to - position, count)
        left = tl.sum(tl.where(index == num_folded - 1, total, 0.0), 0)
        moved *= tl.where(index < num_folded, tl.exp(tl.minimum(left - total, 0.0)), 0.0)[:, None]
        state = tl.dot(tl.trans(b), moved.to(dtype), state * tl.exp(left), input_precision="ieee")
        if position + count == snap_at:
            tl.store(snap_place, state.to(state_ptr.dtype.element_ty))
    tl.store(state_place, state.to(state_ptr.dtype.element_ty))
