"""The short causal convolution before a recurrence, and the ring that keeps its inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_parts import CHUNK, chunk_at, silu, unit
from .step import HostRow, StateStep

_BLOCK = 128  # channels of a program, where they are not those of a head


def short_conv(
    raw: Tensor, weight: Tensor, ring: Tensor, step: StateStep, bias: Tensor | None = None,
    activation: str | None = "silu", gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[p, c] = activation(sum over j < W of weight[c, j] · x[p - W + 1 + j, c] + bias[c]) at the step's tokens,
    rounded, times gate[p, c] where there is one.

    x is raw [T, C], the step's own inputs, and before each row's start the ring [num_slots, R, >= C]; fp32 inside,
    rounded once. weight [C, W], bias [C], gate [T, C]. raw and gate: rows of any stride. Returns [T, C] in raw's dtype.
    The ring is only read: `write_ring` writes it, behind the layer's last kernel that reads it.
    """
    if raw.is_cuda:
        return short_conv_triton(raw, weight, ring, step, bias, activation, gate)
    return short_conv_torch(raw, weight, ring, step, bias, activation, gate)


def write_ring(raw: Tensor, gates: Tensor | None, ring: Tensor, step: StateStep, conv_width: int) -> None:
    """Puts each row's last R inputs of the step into its ring, and what its snapshot needs into that one's.

    raw [T, C] and gates [T, G] or None: rows of any stride. ring [num_slots, R, C + G].
    """
    if raw.is_cuda:
        write_ring_triton(raw, gates, ring, step, conv_width)
    else:
        write_ring_torch(raw, gates, ring, step, conv_width)


def past_inputs(ring: Tensor, row: HostRow, first: int, end: int) -> Tensor:
    """What lies in the ring for the positions first … end - 1, zeros for those below 0: [end - first, C + G]."""
    positions = torch.arange(first, end, device=ring.device)
    return ring[row.slot, positions % ring.shape[1]].masked_fill((positions < 0)[:, None], 0)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The convolution of inputs [W - 1 + n, C]: fp32 [n, C]."""
    width, count = weight.shape[1], len(inputs) - weight.shape[1] + 1
    wide, taps = inputs.float(), weight.float()
    total = wide[:count] * taps[:, 0]
    for tap in range(1, width):
        total = total + wide[tap : tap + count] * taps[:, tap]
    if bias is not None:
        total = total + bias.float()
    return total * torch.sigmoid(total) if activation == "silu" else total


def short_conv_torch(
    raw: Tensor, weight: Tensor, ring: Tensor, step: StateStep, bias: Tensor | None = None,
    activation: str | None = "silu", gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    channels, width = weight.shape
    out = torch.zeros(raw.shape, dtype=raw.dtype, device=raw.device)
    for row in step.on_host():
        past = past_inputs(ring, row, row.start - width + 1, row.start)[:, :channels]
        inputs = torch.cat((past, raw[row.first : row.end]))
        out[row.first : row.end] = convolve(inputs, weight, bias, activation).to(out.dtype)
    return out if gate is None else out * gate


def write_ring_torch(raw: Tensor, gates: Tensor | None, ring: Tensor, step: StateStep, conv_width: int) -> None:
    size = ring.shape[1]
    for row in step.on_host():
        own = raw[row.first : row.end]
        if gates is not None:
            own = torch.cat((own, gates[row.first : row.end]), 1)
        if row.snaps:
            before = row.snap_at - conv_width + 1
            known = torch.cat((past_inputs(ring, row, min(before, row.start), row.start), own))
            offset = before - min(before, row.start)
            kept = torch.arange(before, row.snap_at, device=ring.device) % size
            ring[row.snap_slot, kept, : raw.shape[1]] = known[offset : offset + conv_width - 1, : raw.shape[1]]
        count = min(len(own), size)
        end = row.start + len(own)
        ring[row.slot, torch.arange(end - count, end, device=ring.device) % size] = own[len(own) - count :]


def short_conv_triton(
    raw: Tensor, weight: Tensor, ring: Tensor, step: StateStep, bias: Tensor | None = None,
    activation: str | None = "silu", gate: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out: where the result goes; None: into a new tensor."""
    if out is None:
        out = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    _launch(raw, weight, ring, step, bias, activation, out, out, _BLOCK, 0, gate)
    return out


def convolve_heads(
    raw: Tensor, weight: Tensor, ring: Tensor, step: StateStep, head_size: int, keys: Tensor, others: Tensor
) -> None:
    """short_conv with SiLU into two tensors: of the first channels, heads that become unit vectors, into keys
    [T, channels]; of those behind them into others [T, C - channels]."""
    _launch(raw, weight, ring, step, None, "silu", keys, others, head_size, keys.shape[1])


def _launch(
    raw: Tensor, weight: Tensor, ring: Tensor, step: StateStep, bias: Tensor | None, activation: str | None,
    first: Tensor, second: Tensor, block: int, num_units: int, gate: Tensor | None = None,
) -> None:  # fmt: skip
    channels, width = weight.shape
    places = num_places(step, len(raw))
    if not places:
        return
    _conv_kernel[(triton.cdiv(channels, block), places)](
        raw, weight, weight if bias is None else bias, raw if gate is None else gate, ring, first, second,
        step.query_start, step.start, step.slots, step.num_rows, step.num_rows.bit_length(),
        raw.stride(0), 0 if gate is None else gate.stride(0), ring.stride(0), ring.stride(1), first.stride(0),
        second.stride(0),
        CHANNELS=channels, BLOCK=block, UNITS=num_units, WIDTH=width, RING=ring.shape[1], CHUNK=CHUNK,
        BIAS=bias is not None, SILU=activation == "silu", GATED=gate is not None, num_warps=8,
    )  # fmt: skip


def num_places(step: StateStep, num_tokens: int) -> int:
    """At least as many as the step has chunks; by shapes alone."""
    return num_tokens // CHUNK + 2 * step.num_rows if num_tokens and step.num_rows else 0


def write_ring_triton(raw: Tensor, gates: Tensor | None, ring: Tensor, step: StateStep, conv_width: int) -> None:
    if not step.num_rows:
        return
    channels, gated = raw.shape[1], 0 if gates is None else gates.shape[1]
    own = raw if gates is None else gates
    _write_ring_kernel[(triton.cdiv(channels + gated, _BLOCK), step.num_rows)](
        raw, own, ring, step.slots, step.start, step.state_len, step.fold_to, step.snap_at, step.snap_slot,
        step.query_start, raw.stride(0), own.stride(0), ring.stride(0),
        CHANNELS=channels, GATES=gated, BLOCK=_BLOCK, WIDTH=conv_width, RING=ring.shape[1], num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "search_steps"],
    do_not_specialize_on_alignment=["query_start_ptr", "start_ptr", "slots_ptr"],
)
def _conv_kernel(
    raw_ptr, weight_ptr, bias_ptr, gate_ptr, ring_ptr, first_ptr, second_ptr,
    query_start_ptr, start_ptr, slots_ptr, num_rows, search_steps,
    raw_token, gate_token, ring_slot, ring_row, first_token, second_token,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
    CHUNK: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row, token, position, count = chunk_at(
        tl.program_id(1), query_start_ptr, start_ptr, slots_ptr, num_rows, search_steps, CHUNK
    )
    if count == 0:
        return
    start = tl.load(start_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    index = tl.arange(0, CHUNK)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (index < count)[:, None] & (channel < CHANNELS)[None, :]
    total = tl.zeros((CHUNK, BLOCK), tl.float32)
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=channel < CHANNELS, other=0.0).to(tl.float32)
        place = position + index - WIDTH + 1 + tap
        own = (place >= start)[:, None] & inside
        at = raw_ptr + (token + index - WIDTH + 1 + tap).to(tl.int64)[:, None] * raw_token + channel[None, :]
        value = tl.load(at, mask=own, other=0.0).to(tl.float32)
        past = ((place >= 0) & (place < start))[:, None] & inside
        at = ring_ptr + slot * ring_slot + (place & (RING - 1))[:, None] * ring_row + channel[None, :]
        value += tl.load(at, mask=past, other=0.0).to(tl.float32)
        total += value * weight[None, :]
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = silu(total)
    tokens = (token + index).to(tl.int64)[:, None]
    if GATED:
        gate = tl.load(gate_ptr + tokens * gate_token + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        total = total.to(second_ptr.dtype.element_ty).to(tl.float32) * gate
    if tl.program_id(0) * BLOCK < UNITS:
        at = first_ptr + tokens * first_token + channel[None, :]
        tl.store(at, unit(total).to(first_ptr.dtype.element_ty), mask=inside)
    else:
        at = second_ptr + tokens * second_token + channel[None, :] - UNITS
        tl.store(at, total.to(second_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        "slots_ptr", "start_ptr", "state_len_ptr", "fold_to_ptr", "snap_at_ptr", "snap_slot_ptr", "query_start_ptr"
    ]
)  # fmt: skip
def _write_ring_kernel(
    raw_ptr, gates_ptr, ring_ptr, slots_ptr, start_ptr, state_len_ptr, fold_to_ptr, snap_at_ptr, snap_slot_ptr,
    query_start_ptr, raw_token, gates_token, ring_slot,
    CHANNELS: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    count = (tl.load(query_start_ptr + row + 1) - token).to(tl.int32)
    if (slot == 0) | (count == 0):
        return
    start = tl.load(start_ptr + row)
    snap_at = tl.load(snap_at_ptr + row)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_raw, is_gate = channel < CHANNELS, (channel >= CHANNELS) & (channel < CHANNELS + GATES)
    raw_ptr += token * raw_token + channel
    gates_ptr += token * gates_token + channel - CHANNELS
    ring_ptr += channel
    # One position after the other, each channel by one thread: what a snapshot takes from the ring is read before the
    # step's own inputs come over it.
    if (tl.load(state_len_ptr + row) < snap_at) & (snap_at <= tl.load(fold_to_ptr + row)):
        target = ring_ptr + tl.load(snap_slot_ptr + row).to(tl.int64) * ring_slot
        for back in tl.static_range(1, WIDTH):
            position = snap_at - back
            place = (position & (RING - 1)) * (CHANNELS + GATES)
            past = tl.load(ring_ptr + slot * ring_slot + place, mask=is_raw & (position < start), other=0.0)
            own = tl.load(raw_ptr + (position - start) * raw_token, mask=is_raw & (position >= start), other=0.0)
            tl.store(target + place, tl.where(position < start, past, own), mask=is_raw)
    for index in range(tl.maximum(count - RING, 0), count):
        place = ((start + index) & (RING - 1)) * (CHANNELS + GATES)
        own = tl.load(raw_ptr + index * raw_token, mask=is_raw, other=0.0)
        if GATES:
            own = tl.where(is_raw, own, tl.load(gates_ptr + index * gates_token, mask=is_gate, other=0.0))
        tl.store(ring_ptr + slot * ring_slot + place, own, mask=is_raw | is_gate)
