"""Mamba-2 (Dao and Gu, arXiv 2405.21060) over states of rows: the public function and its twin.

Of each head, with step Δ = clamp(softplus(dt + dt_bias)), decay α = exp(-exp(A_log) · Δ), and B and C of the head's
group: S ← α S + B (Δ x)ᵀ; y = Sᵀ C + D x. All of it in fp32, but for the factors
of prompts' products on a GPU, which are rounded to the activations' dtype.

A chunk of up to 64 tokens at once, with L the running sum of log α:
y = exp(L) C S + lower(C Bᵀ ⊙ exp(Li - Lj)) Δ x + D x;
S ← exp(L_end) S + (B exp(L_end - L))ᵀ Δ x. Chunks end where a position is a multiple of 64, as those of delta nets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta_parts import CHUNK
from .scan_decode import ScanWeights, has_tiles, scan_decode
from .scan_pass import scan_prompts
from .short_conv import convolve, past_inputs, write_ring_torch, write_ring_triton
from .step import StateStep


def scan(
    raw: Tensor, dt: Tensor, weights: ScanWeights, ring: Tensor, state: Tensor, step: StateStep, num_groups: int
) -> Tensor:
    """A layer's convolution and recurrence over the step: [T, H, P] in raw's dtype, undefined at padding tokens.

    raw [T, C] with C = H · P + 2 · G · N: x, B and C before the convolution; dt [T, H]. Both in ring's dtype, rows of
    any stride. ring [num_slots, R, C + H] and state [num_slots, H, N, P] (fp32, fp16 or bf16) contiguous; both are read
    and written as StateStep says. Heads H / G · i … share B and C of group i. SiLU behind the convolution.
    """
    return (scan_triton if raw.is_cuda else scan_torch)(raw, dt, weights, ring, state, step, num_groups)


def scan_triton(
    raw: Tensor, dt: Tensor, weights: ScanWeights, ring: Tensor, state: Tensor, step: StateStep, num_groups: int
) -> Tensor:
    """One launch for decodes, which write their rings themselves, and three for prompts. Raises ValueError for sizes
    that the kernels have no tiles for."""
    heads, rows, columns = state.shape[1:]
    if not has_tiles(rows, columns):
        raise ValueError(
            f"heads of {rows} x {columns}: on a GPU, Mamba-2 needs a power of two of at least 16, and a multiple of 16 "
            "channels; serve the model on the CPU"
        )
    out = torch.empty(len(raw), heads, columns, dtype=raw.dtype, device=raw.device)
    scan_decode(raw, dt, weights, ring, state, step, num_groups, out)
    if step.prompts.num_rows:
        scan_prompts(raw, dt, weights, ring, state, step.prompts, num_groups, out)
        write_ring_triton(raw, dt, ring, step.prompts, weights.conv.shape[1])
    return out


def scan_torch(
    raw: Tensor, dt: Tensor, weights: ScanWeights, ring: Tensor, state: Tensor, step: StateStep, num_groups: int
) -> Tensor:
    heads, _, columns = state.shape[1:]
    out = torch.zeros(len(raw), heads, columns, dtype=raw.dtype, device=raw.device)
    channels, width = weights.conv.shape
    for row in step.on_host():
        past = past_inputs(ring, row, row.state_len - width + 1, row.start)
        inputs = torch.cat((past[:, :channels], raw[row.first : row.end]))
        times = torch.cat((past[width - 1 :, channels:], dt[row.first : row.end]))
        x, b, c = split_heads(convolve(inputs, weights.conv, weights.conv_bias, "silu"), num_groups, state)
        delta = F.softplus(times.float() + weights.dt_bias.float()).clamp(*weights.limits)
        log_decay = -weights.A_log.float().exp() * delta
        moved = x * delta[:, :, None]
        current = state[row.slot].float() if row.state_len else state.new_zeros(state.shape[1:], dtype=torch.float32)
        pending = row.start - row.state_len
        folded = current
        outputs = []
        for position in range(row.state_len, row.start + (row.end - row.first if row.decodes else 0)):
            at = position - row.state_len
            current = current * log_decay[at].exp()[:, None, None] + b[at][:, :, None] * moved[at][:, None, :]
            outputs.append((current * c[at][:, :, None]).sum(1))
            if position < row.fold_to:
                folded = current
            if row.snaps and position + 1 == row.snap_at:
                state[row.snap_slot] = current.to(state.dtype)
        outputs = outputs[pending:]
        position, end = row.start, row.start + row.end - row.first
        while not row.decodes and position < end:
            last = min(end, position // CHUNK * CHUNK + CHUNK)
            part = slice(position - row.state_len, last - row.state_len)
            num_folded = min(max(row.fold_to - position, 0), last - position)
            folded, output = one_chunk(folded, c[part], b[part], moved[part], log_decay[part], num_folded)
            outputs.extend(output)
            if row.snaps and last == row.snap_at:
                state[row.snap_slot] = folded.to(state.dtype)
            position = last
        skipped = weights.D.float()[:, None] * x[pending:]
        out[row.first : row.end] = (torch.stack(outputs) + skipped).to(out.dtype)
        state[row.slot] = folded.to(state.dtype)
    write_ring_torch(raw, dt, ring, step, width)
    return out


def split_heads(mixed: Tensor, num_groups: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, B and C of mixed [n, C]: fp32 [n, H, P] and [n, H, N] twice."""
    heads, rows, columns = state.shape[1:]
    x, *both = mixed.float().split((heads * columns, num_groups * rows, num_groups * rows), -1)
    b, c = (part.unflatten(-1, (num_groups, rows)).repeat_interleave(heads // num_groups, 1) for part in both)
    return x.unflatten(-1, (heads, columns)), b, c


def one_chunk(
    state: Tensor, c: Tensor, b: Tensor, moved: Tensor, log_decay: Tensor, num_folded: int
) -> tuple[Tensor, Tensor]:
    """The state [H, N, P] after the first `num_folded` of up to 64 tokens, and Sᵀ C of all: [n, H, P]. moved: Δ x."""
    count = len(c)
    # Always 64, so that the products are the same ones whatever the number of tokens.
    c, b, moved = (F.pad(part, (0, 0, 0, 0, 0, CHUNK - count)).transpose(0, 1) for part in (c, b, moved))
    total = F.pad(log_decay, (0, 0, 0, CHUNK - count)).T.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=c.device).tril()
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~lower, float("-inf")).exp()
    output = total.exp()[:, :, None] * (c @ state) + (c @ b.mT * decay) @ moved
    if num_folded:
        left = total[:, num_folded - 1 : num_folded]
        share = (left - total).exp()
        share[:, num_folded:] = 0
        state = left.exp()[:, :, None] * state + (b * share[:, :, None]).mT @ moved
    return state, output.transpose(0, 1)[:count]
