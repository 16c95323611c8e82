"""Chunks in 16 bits against the recurrence in fp64: about as near to it as the form of flash-linear-attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vserve.kernels.state import delta_net

from .states import WIDTH, Layer, Piece, recurrence

CHUNK, TOKENS = 64, 320
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # products of the interpreter know no bf16


def rounded(x: Tensor) -> Tensor:
    return x.to(DTYPE).float()


def by_flash_linear_attention(layer: Layer, raw: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, Hv, V] and the state behind them [Hv, K, V], in fp32 on the CPU, rounded where
    fla.ops.gated_delta_rule stores or multiplies 16 bits: what is convolved, unit vectors, the inverse, its two
    products, states that are multiplied, new values, shares."""
    raw, gates, weight = raw.float().cpu(), gates.float().cpu(), layer.weight.float().cpu()
    full = torch.cat((raw.new_zeros(WIDTH - 1, raw.shape[1]), raw))
    mixed = sum(full[tap : tap + len(raw)] * weight[:, tap] for tap in range(WIDTH))
    q, k, v = delta_net.split_heads(rounded(mixed * torch.sigmoid(mixed)), layer.key_heads, layer.state)
    scale = layer.key_dim**-0.5
    q, k = rounded(q / scale), rounded(k)
    decay, beta = delta_net.gate_values(gates, layer.A_log.cpu(), layer.dt_bias.cpu())
    state = torch.zeros(layer.heads, layer.key_dim, layer.value_dim)
    outputs = []
    for first in range(0, len(raw), CHUNK):
        a, b, c = (x[first : first + CHUNK].transpose(0, 1) for x in (q, k, v))
        g, share = decay[first : first + CHUNK].T.cumsum(-1), beta[first : first + CHUNK].T[:, :, None]
        between = (g[:, :, None] - g[:, None, :]).tril().exp().tril()
        system = torch.eye(a.shape[1]) + (share * (b @ b.mT) * between).tril(-1)
        inverse = rounded(torch.linalg.inv(system.double()).float())
        w = rounded(inverse @ rounded(b * share * g.exp()[:, :, None]))
        u = rounded(inverse @ rounded(c * share))
        new = u - w @ rounded(state)
        output = a @ rounded(state) * g.exp()[:, :, None] + rounded((a @ b.mT) * between) @ rounded(new)
        outputs.append(rounded(output * scale).transpose(0, 1))
        left = g[:, -1:, None]
        state = state * left.exp() + b.mT @ rounded(new * (left - g[:, :, None]).exp())
    return torch.cat(outputs), state


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Of each head, relative."""
    return (found.double().cpu() - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))


@pytest.mark.parametrize("repeats", [False, True])
def test_16_bits_are_as_near_as_others(repeats: bool, device: str) -> None:
    """Half-lives of 1 to 10,000 tokens. repeats: keys that recur again and again, for which the inverse is hard."""
    rng = torch.Generator().manual_seed(7)
    layer = Layer(rng, device, DTYPE, key_heads=1, heads=4, key_dim=128, value_dim=128, num_slots=3)
    one = layer.sequence(TOKENS, 1)
    if repeats:
        one.raw[:, : 2 * layer.key_dim] = one.raw[:1, : 2 * layer.key_dim] + one.raw[:, : 2 * layer.key_dim] / 8
        one.gates[:, : layer.heads] += 3
    layer.run(delta_net.delta_net_triton, [], [Piece(one, TOKENS, True)])
    expected, states = recurrence(layer, one.raw, one.gates)
    others, _ = by_flash_linear_attention(layer, one.raw, one.gates)
    ours, theirs = errors(one.outputs[0], expected), errors(others, expected)
    assert (ours <= 2 * theirs).all(), (ours, theirs)
    _, other = by_flash_linear_attention(layer, one.raw[:-1], one.gates[:-1])  # the last token is folded later
    ours, theirs = (errors(state.transpose(0, 1), states[-2].transpose(0, 1)) for state in (layer.state[1], other))
    assert (ours <= 2 * theirs).all(), (ours, theirs)


def test_inverse_of_keys_that_are_all_one(device: str) -> None:
    """All ones below the diagonal: 64 powers of that reach 1e18, and the inverse is -1 beside the diagonal."""
    rng = torch.Generator().manual_seed(3)
    layer = Layer(rng, device, torch.float32, key_heads=1, heads=1, num_slots=3)
    one = layer.sequence(128, 1)
    one.raw[:, : 2 * layer.key_dim] = F.relu(one.raw[:1, : 2 * layer.key_dim]) + 0.1
    one.gates[:, :1], one.gates[:, 1:] = 30, -30  # β 1, no decay
    layer.run(delta_net.delta_net_triton, [], [Piece(one, 128, True)])
    expected, _ = recurrence(layer, one.raw, one.gates)
    torch.testing.assert_close(one.outputs[0].double().cpu(), expected, rtol=1e-4, atol=1e-5)
