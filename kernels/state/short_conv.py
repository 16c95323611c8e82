"""The short causal convolution before a recurrence, and the ring that keeps its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .step import HostRow, StateStep


def short_conv(
    raw: Tensor, weight: Tensor, ring: Tensor, step: StateStep, bias: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:  # fmt: skip
    """y[p, c] = activation(sum over j < W of weight[c, j] · x[p - W + 1 + j, c] + bias[c]) at the step's tokens.

    x is raw [T, C], the step's own inputs, and before each row's start the ring [num_slots, R, >= C]; fp32 inside,
    rounded once. weight [C, W], bias [C]. raw: rows of any stride. Returns [T, C] in raw's dtype. The ring is only
    read: `write_ring` writes it, behind the layer's last kernel that reads it.
    """
    return short_conv_torch(raw, weight, ring, step, bias, activation)


def write_ring(raw: Tensor, gates: Tensor | None, ring: Tensor, step: StateStep, conv_width: int) -> None:
    """Puts each row's last R inputs of the step into its ring, and what its snapshot needs into that one's.

    raw [T, C] and gates [T, G] or None: rows of any stride. ring [num_slots, R, C + G].
    """
    write_ring_torch(raw, gates, ring, step, conv_width)


def past_inputs(ring: Tensor, row: HostRow, first: int, end: int) -> Tensor:
    """What lies in the ring for the positions first … end - 1, zeros for those below 0: [end - first, C + G]."""
    positions = torch.arange(first, end, device=ring.device)
    return ring[row.slot, positions % ring.shape[1]].masked_fill((positions < 0)[:, None], 0)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The convolution of inputs [..., W - 1 + n, C]: [..., n, C], rounded to their dtype."""
    width, count = weight.shape[1], inputs.shape[-2] - weight.shape[1] + 1
    wide, taps = inputs.float(), weight.float()
    total = wide[..., :count, :] * taps[:, 0]
    for tap in range(1, width):
        total = total + wide[..., tap : tap + count, :] * taps[:, tap]
    if bias is not None:
        total = total + bias.float()
    if activation == "silu":
        total = total * torch.sigmoid(total)
    return total.to(inputs.dtype)


def short_conv_torch(
    raw: Tensor, weight: Tensor, ring: Tensor, step: StateStep, bias: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:  # fmt: skip
    channels, width = weight.shape
    out = torch.zeros(raw.shape, dtype=raw.dtype, device=raw.device)
    for row in step.on_host():
        past = past_inputs(ring, row, row.start - width + 1, row.start)[:, :channels]
        inputs = torch.cat((past, raw[row.first : row.end]))
        out[row.first : row.end] = convolve(inputs, weight, bias, activation)
    return out


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
            ring[row.snap_slot, kept] = known[offset : offset + conv_width - 1]
        count = min(len(own), size)
        end = row.start + len(own)
        ring[row.slot, torch.arange(end - count, end, device=ring.device) % size] = own[len(own) - count :]
