"""Requests that are computed in steps by a layer with recurrent state, and what they must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vserve.kernels.state.step import StateStep

WIDTH = 4


@dataclass
class Sequence:
    """A request: all its inputs, and how far it is."""

    raw: Tensor  # [n, C]
    gates: Tensor  # [n, 2 Hv]
    slot: int
    computed: int = 0
    folded: int = 0  # state_len
    outputs: list[Tensor] = field(default_factory=list)


@dataclass
class Piece:
    """A sequence's part of a step."""

    sequence: Sequence
    tokens: int
    samples: bool = False
    snap_at: int = 0
    snap_slot: int = 0


class Stepped:
    """A layer that is computed in steps; every slot is full of NaN until it is written."""

    raw_size: int
    num_gates = 0
    out_shape: tuple[int, ...]  # of a token
    dtype: torch.dtype
    device: str
    rng: torch.Generator
    drafts = 0

    def call(self, function: Callable[..., Tensor], raw: Tensor, gates: Tensor, step: StateStep) -> Tensor:
        raise NotImplementedError

    def sequence(self, length: int, slot: int) -> Sequence:
        raw = torch.randn(length, self.raw_size, generator=self.rng).to(self.dtype).to(self.device)
        gates = torch.randn(length, self.num_gates, generator=self.rng).to(self.dtype).to(self.device)
        return Sequence(raw, gates, slot)

    def step(
        self, decodes: list[Sequence], prompts: list[Piece], padding: tuple[int, int] = (0, 0), tokens: int = 0,
        snaps: dict[int, tuple[int, int]] | None = None,
    ) -> tuple[Tensor, Tensor, StateStep]:  # fmt: skip
        """raw, gates and the StateStep of a step. Padding: rows behind the decodes, rows behind the prompts; at least
        `tokens` tokens. snaps: of decodes by index, (snap_at, snap_slot)."""
        query_len = 1 + self.drafts
        rows: list[tuple[int, int, int, int, int, int, int]] = []
        parts: list[tuple[Tensor, Tensor]] = []
        for index, one in enumerate(decodes):
            snap = (snaps or {}).get(index, (0, 0))
            rows.append((one.slot, one.computed, one.folded, one.computed, *snap, query_len))
            span = slice(one.computed, one.computed + query_len)
            parts.append((one.raw[span], one.gates[span]))
        rows += [(0, 0, 0, 0, 0, 0, 0)] * padding[0]
        for piece in prompts:
            one, end = piece.sequence, piece.sequence.computed + piece.tokens
            fold_to = end - 1 if piece.samples else end
            rows.append((one.slot, one.computed, one.folded, fold_to, piece.snap_at, piece.snap_slot, piece.tokens))
            parts.append((one.raw[one.computed : end], one.gates[one.computed : end]))
        rows += [(0, 0, 0, 0, 0, 0, 0)] * padding[1]
        columns = torch.tensor(rows, dtype=torch.int32).T.to(self.device)
        starts = torch.cat((columns.new_zeros(1), columns[6].cumsum(0).int()))
        total = max(tokens, int(starts[-1]))
        both = torch.full((total, self.raw_size + 5 + self.num_gates), float("nan"), dtype=self.dtype)
        both = both.to(self.device)  # one product, and the two are parts of it
        raw, gates = both[:, : self.raw_size], both[:, self.raw_size + 5 :]
        raw[: int(starts[-1])] = torch.cat([part[0] for part in parts])
        gates[: int(starts[-1])] = torch.cat([part[1] for part in parts])
        table = [column.contiguous() for column in columns[:6]]
        return raw, gates, StateStep(*table, starts, len(decodes) + padding[0], query_len)

    def run(
        self, function: Callable[..., Tensor], decodes: list[Sequence], prompts: list[Piece], *,
        kept: list[int] | None = None, padding: tuple[int, int] = (0, 0), tokens: int = 0,
        snaps: dict[int, tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        """A step, after which each decode keeps kept[i] of its 1 + drafts tokens (all, if not said)."""
        raw, gates, step = self.step(decodes, prompts, padding, tokens, snaps)
        out = self.call(function, raw, gates, step)
        assert out.shape == (len(raw), *self.out_shape) and out.dtype == self.dtype
        starts, folds = step.query_start.tolist(), step.fold_to.tolist()
        for index, one in enumerate(decodes):
            taken = kept[index] if kept else 1 + self.drafts
            one.outputs.append(out[starts[index] : starts[index] + taken].clone())
            one.folded, one.computed = folds[index], one.computed + taken
        for index, piece in enumerate(prompts, len(decodes) + padding[0]):
            one = piece.sequence
            one.outputs.append(out[starts[index] : starts[index + 1]].clone())
            one.folded, one.computed = folds[index], one.computed + piece.tokens


class Layer(Stepped):
    """A delta net's weights and states."""

    def __init__(
        self, rng: torch.Generator, device: str = "cpu", dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32, key_heads: int = 2, heads: int = 4, key_dim: int = 16,
        value_dim: int = 16, num_slots: int = 12, drafts: int = 0,
    ) -> None:  # fmt: skip
        self.key_heads, self.heads, self.key_dim, self.value_dim = key_heads, heads, key_dim, value_dim
        self.channels = self.raw_size = 2 * key_heads * key_dim + heads * value_dim
        self.num_gates, self.out_shape = 2 * heads, (heads, value_dim)
        self.dtype, self.device, self.rng, self.drafts = dtype, device, rng, drafts
        ring = 1 << (WIDTH - 1 + 2 * (1 + drafts) - 1).bit_length()
        self.weight = (torch.randn(self.channels, WIDTH, generator=rng) / 2).to(dtype).to(device)
        half_lives = torch.logspace(0, 4, heads)
        self.A_log = (0.693 / half_lives).log().to(device)
        self.dt_bias = (torch.rand(heads, generator=rng) + 0.5).to(device)
        nan = float("nan")
        self.ring = torch.full((num_slots, ring, self.channels + 2 * heads), nan, dtype=dtype, device=device)
        shape = (num_slots, heads, key_dim, value_dim)
        self.state = torch.full(shape, nan, dtype=state_dtype, device=device)

    def call(self, function: Callable[..., Tensor], raw: Tensor, gates: Tensor, step: StateStep) -> Tensor:
        layer = self.weight, self.A_log, self.dt_bias, self.ring, self.state
        return function(raw, gates, *layer, step, self.key_heads)


def recurrence(layer: Layer, raw: Tensor, gates: Tensor, round_to: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Outputs [n, Hv, V] and states [n, Hv, K, V] of a whole sequence token by token, in fp64. round_to: where kernels
    may round the convolution's result."""
    raw, gates, weight = raw.double().cpu(), gates.double().cpu(), layer.weight.double().cpu()
    count, heads, group = len(raw), layer.heads, layer.heads // layer.key_heads
    full = torch.cat((raw.new_zeros(WIDTH - 1, raw.shape[1]), raw))
    mixed = sum(full[tap : tap + count] * weight[:, tap] for tap in range(WIDTH))
    mixed = mixed * torch.sigmoid(mixed)
    if round_to is not None:
        mixed = mixed.to(round_to).double()
    keys = layer.key_heads * layer.key_dim
    q, k, v = mixed.split((keys, keys, heads * layer.value_dim), 1)
    q, k = (x.view(count, layer.key_heads, layer.key_dim) for x in (q, k))
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(group, 1) for x in (q, k))
    q, v = q / layer.key_dim**0.5, v.view(count, heads, layer.value_dim)
    beta = torch.sigmoid(gates[:, :heads])
    rate = layer.A_log.double().cpu().exp()
    decay = (-rate * torch.nn.functional.softplus(gates[:, heads:] + layer.dt_bias.double().cpu())).exp()
    state = raw.new_zeros(heads, layer.key_dim, layer.value_dim)
    outputs, states = [], []
    for t in range(count):
        state = state * decay[t][:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)
