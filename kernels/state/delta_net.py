"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) over states of rows: the public function and its twin.

Of each value head, with k and q of unit length, decay α = exp(-exp(A_log) · softplus(a + dt_bias)) and β = sigmoid(b):
S ← α S; d = β (v - Sᵀ k); S ← S + k dᵀ; o = Sᵀ q / sqrt(K). All of it in fp32.

A chunk of up to 64 tokens at once: with G the running sum of log α, A the strictly lower part of β k kᵀ ⊙ exp(Gi - Gj)
and T = (I + A)⁻¹: U = T (β v), W = T (β k exp(G)); v' = U - W S; o = exp(G) q S + lower(q kᵀ ⊙ exp(Gi - Gj)) v';
S ← exp(G_end) S + (k exp(G_end - G))ᵀ v'. Chunks end where a position is a multiple of 64: a prompt that is computed
in several steps which end there gives bitwise what it gives in one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta_decode import delta_decode
from .delta_parts import CHUNK, L2_EPS
from .delta_pass import delta_prompts
from .short_conv import convolve, past_inputs, write_ring_torch, write_ring_triton
from .step import StateStep


def delta_net(
    raw: Tensor, gates: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, ring: Tensor, state: Tensor,
    step: StateStep, num_key_heads: int,
) -> Tensor:  # fmt: skip
    """A layer's convolution and recurrence over the step: [T, Hv, V] in raw's dtype, undefined at padding tokens.

    raw [T, C] with C = 2 · Hk · K + Hv · V: queries, keys and values before the convolution; gates [T, 2 · Hv]: b, then
    a. Both in ring's dtype, rows of any stride. conv_weight [C, W] of any float dtype; A_log and dt_bias fp32 [Hv].
    ring [num_slots, R, C + 2 · Hv] and state [num_slots, Hv, K, V] (fp32, fp16 or bf16) contiguous; both are read and
    written as StateStep says. Value heads Hv / Hk · i … share key head i. SiLU behind the convolution, without a bias.
    """
    function = delta_net_triton if raw.is_cuda else delta_net_torch
    return function(raw, gates, conv_weight, A_log, dt_bias, ring, state, step, num_key_heads)


def delta_net_triton(
    raw: Tensor, gates: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, ring: Tensor, state: Tensor,
    step: StateStep, num_key_heads: int,
) -> Tensor:  # fmt: skip
    """One launch for decodes, which write their rings themselves, and four for prompts. Raises ValueError for sizes
    that the kernels have no tiles for."""
    heads, key_dim, value_dim = state.shape[1:]
    if min(key_dim, value_dim) < 16 or key_dim & (key_dim - 1) or value_dim & (value_dim - 1):
        raise ValueError(
            f"heads of {key_dim} x {value_dim}: on a GPU, delta nets need powers of two of at least 16; serve the "
            "model on the CPU"
        )
    out = torch.empty(len(raw), heads, value_dim, dtype=raw.dtype, device=raw.device)
    layer = conv_weight, A_log, dt_bias, ring, state
    delta_decode(raw, gates, *layer, step, num_key_heads, out)
    if step.prompts.num_rows:
        delta_prompts(raw, gates, *layer, step.prompts, num_key_heads, out)
        write_ring_triton(raw, gates, ring, step.prompts, conv_weight.shape[1])
    return out


def delta_net_torch(
    raw: Tensor, gates: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, ring: Tensor, state: Tensor,
    step: StateStep, num_key_heads: int,
) -> Tensor:  # fmt: skip
    heads, _, value_dim = state.shape[1:]
    out = torch.zeros(len(raw), heads, value_dim, dtype=raw.dtype, device=raw.device)
    channels, width = conv_weight.shape
    for row in step.on_host():
        past = past_inputs(ring, row, row.state_len - width + 1, row.start)
        inputs = torch.cat((past[:, :channels], raw[row.first : row.end]))
        gate_inputs = torch.cat((past[width - 1 :, channels:], gates[row.first : row.end]))
        mixed = convolve(inputs, conv_weight, None, "silu")
        q, k, v = split_heads(mixed, num_key_heads, state)
        log_decay, beta = gate_values(gate_inputs, A_log, dt_bias)
        current = state[row.slot].float() if row.state_len else state.new_zeros(state.shape[1:], dtype=torch.float32)
        pending = row.start - row.state_len
        folded = current
        outputs = []
        for position in range(row.state_len, row.start + (row.end - row.first if row.decodes else 0)):
            at = position - row.state_len
            current, output = one_token(current, q[at], k[at], v[at], log_decay[at], beta[at])
            outputs.append(output)
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
            folded, output = one_chunk(folded, q[part], k[part], v[part], log_decay[part], beta[part], num_folded)
            outputs.extend(output)
            if row.snaps and last == row.snap_at:
                state[row.snap_slot] = folded.to(state.dtype)
            position = last
        out[row.first : row.end] = torch.stack(outputs).to(out.dtype)
        state[row.slot] = folded.to(state.dtype)
    write_ring_torch(raw, gates, ring, step, width)
    return out


def split_heads(mixed: Tensor, num_key_heads: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (of unit length; queries divided by sqrt(K)) and values of mixed [n, C]: fp32 [n, Hv, K or V]."""
    heads, key_dim, value_dim = state.shape[1:]
    sizes = (num_key_heads * key_dim, num_key_heads * key_dim, heads * value_dim)
    q, k, v = mixed.float().split(sizes, -1)
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(heads // num_key_heads, 1)
        for x in (q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)))
    )
    return q * key_dim**-0.5, k, v.unflatten(-1, (heads, value_dim))


def gate_values(gates: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """log α and β of gates [n, 2 · Hv]: fp32 [n, Hv] each."""
    b, a = gates.float().chunk(2, -1)
    return -A_log.float().exp() * F.softplus(a + dt_bias.float()), torch.sigmoid(b)


def one_token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The state [Hv, K, V] after one token, and its output [Hv, V]."""
    state = state * log_decay.exp()[:, None, None]
    delta = (v - (state * k[:, :, None]).sum(1)) * beta[:, None]
    state = state + k[:, :, None] * delta[:, None, :]
    return state, (state * q[:, :, None]).sum(1)


def one_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, num_folded: int
) -> tuple[Tensor, Tensor]:
    """The state [Hv, K, V] after the first `num_folded` of up to 64 tokens, and the outputs of all: [n, Hv, V]."""
    count = len(q)
    # Always 64, so that the products are the same ones whatever the number of tokens.
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, CHUNK - count)).transpose(0, 1) for x in (q, k, v))
    log_decay, beta = (F.pad(x, (0, 0, 0, CHUNK - count)).T for x in (log_decay, beta))
    total = log_decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (beta[:, :, None] * (k @ k.mT) * decay).tril(-1)
    right = torch.cat((beta[:, :, None] * v, (beta * total.exp())[:, :, None] * k), 2)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values = solved[:, :, : v.shape[2]] - solved[:, :, v.shape[2] :] @ state
    output = total.exp()[:, :, None] * (q @ state) + (q @ k.mT * decay) @ values
    if num_folded:
        left = total[:, num_folded - 1 : num_folded]
        share = (left - total).exp()
        share[:, num_folded:] = 0
        state = left.exp()[:, :, None] * state + (k * share[:, :, None]).mT @ values
    return state, output.transpose(0, 1)[:count]
