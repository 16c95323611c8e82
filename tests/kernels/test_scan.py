"""Mamba-2 in ragged pieces against the recurrence token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vserve.kernels.state import group_norm
from vserve.kernels.state import scan as module
from vserve.kernels.state.scan_decode import ScanWeights
from vserve.kernels.state.step import StateStep

from .states import WIDTH, Piece, Sequence, Stepped

PATHS = {"torch": module.scan_torch, "triton": module.scan_triton}
HEADS, GROUPS, ROWS, COLUMNS = 4, 2, 16, 32


@pytest.fixture(params=PATHS)
def function(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return PATHS[request.param]


class Scan(Stepped):
    num_gates, dtype = HEADS, torch.float32

    def __init__(
        self, rng: torch.Generator, device: str, drafts: int = 0, limits: tuple[float, float] = (0.0, float("inf")),
        biased: bool = True, columns: int = COLUMNS,
    ) -> None:  # fmt: skip
        self.raw_size, self.out_shape = HEADS * columns + 2 * GROUPS * ROWS, (HEADS, columns)
        self.rng, self.device, self.drafts = rng, device, drafts
        vectors = torch.rand(3, HEADS, generator=rng).to(device)
        decays = (0.693 / torch.logspace(0, 4, HEADS, device=device)).log()
        bias = torch.randn(self.raw_size, generator=rng).to(device) if biased else None
        weight = (torch.randn(self.raw_size, WIDTH, generator=rng) / 2).to(device)
        self.weights = ScanWeights(weight, bias, decays, vectors[0] - 0.5, vectors[1] + 0.5, limits)
        nan, ring = float("nan"), 1 << (WIDTH - 1 + 2 * (1 + drafts) - 1).bit_length()
        self.ring = torch.full((10, ring, self.raw_size + HEADS), nan, device=device)
        self.state = torch.full((10, HEADS, ROWS, columns), nan, device=device)

    def call(self, function: Callable[..., Tensor], raw: Tensor, gates: Tensor, step: StateStep) -> Tensor:
        return function(raw, gates, self.weights, self.ring, self.state, step, GROUPS)

    def recurrence(self, one: Sequence) -> tuple[Tensor, Tensor]:
        """Outputs [n, H, P] and states [n, H, N, P] of what is computed, in fp64."""
        count, weights, columns = one.computed, self.weights, self.out_shape[1]
        raw, dt = one.raw[:count].double().cpu(), one.gates[:count].double().cpu()
        full = torch.cat((raw.new_zeros(WIDTH - 1, raw.shape[1]), raw))
        mixed = sum(full[tap : tap + count] * weights.conv.double().cpu()[:, tap] for tap in range(WIDTH))
        mixed = torch.nn.functional.silu(mixed + (0 if weights.conv_bias is None else weights.conv_bias.double().cpu()))
        x, b, c = mixed.split((HEADS * columns, GROUPS * ROWS, GROUPS * ROWS), 1)
        x = x.view(count, HEADS, columns)
        b, c = (part.view(count, GROUPS, ROWS).repeat_interleave(HEADS // GROUPS, 1) for part in (b, c))
        delta = torch.nn.functional.softplus(dt + weights.dt_bias.double().cpu()).clamp(*weights.limits)
        decay = (-weights.A_log.double().cpu().exp() * delta).exp()
        state, outputs, states = raw.new_zeros(HEADS, ROWS, columns), [], []
        for t in range(count):
            moved = delta[t][:, None] * x[t]
            state = state * decay[t][:, None, None] + b[t][:, :, None] * moved[:, None]
            outputs.append(torch.einsum("hnp,hn->hp", state, c[t]) + weights.D.double().cpu()[:, None] * x[t])
            states.append(state)
        return torch.stack(outputs), torch.stack(states)

    def check(self, one: Sequence, first: int = 0) -> None:
        """All outputs so far, the first of which is this position's, and the state."""
        outputs, states = self.recurrence(one)
        found = torch.cat(one.outputs).double().cpu()
        torch.testing.assert_close(found, outputs[first:], rtol=2e-5, atol=2e-5)
        if one.folded:
            state = self.state[one.slot].double().cpu()
            torch.testing.assert_close(state, states[one.folded - 1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("limits", "biased"), [((0.0, float("inf")), True), ((0.4, 0.9), False)])
def test_prompts_and_decodes(
    function: Callable[..., Tensor], limits: tuple[float, float], biased: bool, device: str, rng: torch.Generator
) -> None:
    layer = Scan(rng, device, limits=limits, biased=biased)
    first, second, third = layer.sequence(90, 3), layer.sequence(150, 7), layer.sequence(5, 1)
    layer.run(function, [], [Piece(first, 70, True), Piece(second, 64), Piece(third, 1, True)], tokens=140)
    layer.run(function, [first, third], [Piece(second, 64)], padding=(2, 1))
    layer.run(function, [third, first], [Piece(second, 1)])
    layer.run(function, [first, third], [Piece(second, 7, True)], padding=(1, 0), tokens=17)
    layer.run(function, [first, second], [], padding=(3, 0))
    for one in (first, second, third):
        layer.check(one)
    assert layer.state[[0, 2, 4, 5, 6]].isnan().all() and layer.ring[[0, 2, 4, 5, 6]].isnan().all()


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_are_never_folded_before_they_are_certain(
    function: Callable[..., Tensor], drafts: int, device: str, rng: torch.Generator
) -> None:
    layer = Scan(rng, device, drafts=drafts)
    one = layer.sequence(60, 2)
    layer.run(function, [], [Piece(one, 11, True)])
    wrong = one.raw.clone()
    for step in range(4):
        kept, right = 1 + step % (1 + drafts), one.raw.clone()
        one.raw[one.computed + kept :] = 7 * wrong[one.computed + kept :]  # drafts that will not hold
        layer.run(function, [one], [], kept=[kept])
        one.raw = right
        layer.check(one)
    layer.run(function, [], [Piece(one, 9, True)])  # what is pending, before a prompt's chunk
    layer.check(one)


def test_splits_at_multiples_of_64_are_bitwise_the_whole(
    function: Callable[..., Tensor], device: str, rng: torch.Generator
) -> None:
    layer = Scan(rng, device)
    whole, parts, company = layer.sequence(200, 1), layer.sequence(200, 2), layer.sequence(100, 3)
    parts.raw, parts.gates = whole.raw, whole.gates
    layer.run(function, [], [Piece(whole, 200, True)])
    layer.run(function, [], [Piece(parts, 64), Piece(company, 37)])
    layer.run(function, [], [Piece(company, 50), Piece(parts, 128)])
    layer.run(function, [], [Piece(parts, 8, True)])
    assert torch.equal(torch.cat(whole.outputs), torch.cat(parts.outputs))
    assert torch.equal(layer.state[1], layer.state[2])


def test_snapshots(function: Callable[..., Tensor], device: str, rng: torch.Generator) -> None:
    """Of a prompt, and of a decode as the fold passes the boundary."""
    layer = Scan(rng, device)
    one, other = layer.sequence(90, 1), layer.sequence(90, 2)
    layer.run(function, [], [Piece(one, 70, True, 64, 4), Piece(other, 62, True)])
    for _ in range(2):
        layer.run(function, [other, one], [], snaps={0: (64, 5)})
        assert layer.state[5].isnan().all()
    layer.run(function, [other, one], [], snaps={0: (64, 5)})
    for slot, source in ((4, one), (5, other)):
        restored = Sequence(source.raw, source.gates, slot, 64, 64)
        layer.run(function, [], [Piece(restored, 6, True)])
        layer.check(restored, 64)
    layer.check(one)
    layer.check(other)


def test_a_state_is_forgotten_where_nothing_is_folded(
    function: Callable[..., Tensor], device: str, rng: torch.Generator
) -> None:
    layer = Scan(rng, device)
    one, fresh = layer.sequence(20, 1), layer.sequence(20, 1)
    layer.run(function, [], [Piece(one, 17, True)])
    layer.run(function, [fresh], [])
    layer.run(function, [fresh], [])
    layer.run(function, [], [Piece(fresh, 4, True)])
    layer.check(fresh)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["gate_first", "norm_first", "no norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_group_norm(path: str, order: str, dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    y = torch.randn(5, 96, generator=rng).to(dtype).to(device)
    z = torch.randn(5, 100, generator=rng).to(dtype).to(device)[:, 2:98]
    weight = None if order == "no norm" else torch.randn(96, generator=rng).to(dtype).to(device)
    values, gate = y.double(), torch.nn.functional.silu(z.double())
    values = values if order == "norm_first" else values * gate
    if weight is not None:
        grouped = values.unflatten(1, (2, 48))
        values = (grouped * (grouped.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(1) * weight.double()
    values = values * gate if order == "norm_first" else values
    found = getattr(group_norm, f"gated_group_norm_{path}")(y, z, weight, 2, 1e-6, order)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), values, rtol=3 * eps, atol=4 * eps)


def test_heads_that_are_no_power_of_two_wide(
    function: Callable[..., Tensor], device: str, rng: torch.Generator
) -> None:
    """As the 80 channels of Nemotron Nano 2, of which a program has 16."""
    layer = Scan(rng, device, columns=48)
    one = layer.sequence(75, 1)
    layer.run(function, [], [Piece(one, 70, True, 64, 2)])
    layer.run(function, [one], [])
    layer.run(function, [one], [])
    layer.check(one)
    restored = Sequence(one.raw, one.gates, 2, 64, 64)
    layer.run(function, [], [Piece(restored, 6, True)])
    layer.check(restored, 64)


def test_sizes_without_tiles(device: str) -> None:
    empty = torch.empty(0, 4)
    with pytest.raises(ValueError, match=r"heads of 16 x 24: .*a multiple of 16"):
        module.scan_triton(empty, empty, None, empty, torch.empty(1, 2, 16, 24), None, 1)  # type: ignore[arg-type]
