"""Delta nets in ragged pieces against the recurrence token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vserve.kernels.state import delta_net as module

from .states import WIDTH, Layer, Piece, Sequence, recurrence

PATHS = {"torch": module.delta_net_torch, "triton": module.delta_net_triton}


@pytest.fixture(params=PATHS)
def function(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return PATHS[request.param]


def check(layer: Layer, one: Sequence, tolerance: float = 1e-5) -> None:
    """All outputs so far, and the state."""
    outputs, states = recurrence(layer, one.raw[: one.computed], one.gates[: one.computed])
    torch.testing.assert_close(torch.cat(one.outputs).double().cpu(), outputs, rtol=tolerance, atol=tolerance)
    if one.folded:
        state = layer.state[one.slot].double().cpu()
        torch.testing.assert_close(state, states[one.folded - 1], rtol=tolerance, atol=tolerance)


def test_prompts_and_decodes(function: Callable[..., Tensor], device: str, rng: torch.Generator) -> None:
    layer = Layer(rng, device)
    first, second, third = layer.sequence(90, 3), layer.sequence(150, 7), layer.sequence(5, 1)
    layer.run(function, [], [Piece(first, 70, True), Piece(second, 64), Piece(third, 1, True)], tokens=140)
    layer.run(function, [first, third], [Piece(second, 64)], padding=(2, 1))
    layer.run(function, [third, first], [Piece(second, 1)])
    layer.run(function, [first, third], [Piece(second, 7, True)], padding=(1, 0), tokens=17)
    for _ in range(2):
        layer.run(function, [first, second], [], padding=(3, 0))
    for one in (first, second, third):
        check(layer, one)
    assert layer.state[0].isnan().all() and layer.ring[0].isnan().all()  # nobody writes what padding points to
    assert layer.state[[2, 4, 5, 6]].isnan().all() and layer.ring[[2, 4, 5, 6]].isnan().all()


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_drafts_are_never_folded_before_they_are_certain(
    function: Callable[..., Tensor], drafts: int, device: str, rng: torch.Generator
) -> None:
    """What a draft leaves behind is overwritten by what comes in its place."""
    layer = Layer(rng, device, key_heads=1, heads=2, drafts=drafts)
    one, other = layer.sequence(60, 2), layer.sequence(60, 5)
    layer.run(function, [], [Piece(one, 11, True), Piece(other, 3, True)])
    wrong = one.raw.clone()
    for step in range(4):
        kept = [1 + step % (1 + drafts), 1 + drafts]
        right = one.raw.clone()
        behind = one.computed + kept[0]
        one.raw[behind:] = 7 * wrong[behind:]  # drafts that will not hold
        layer.run(function, [one, other] if other.computed + 1 + drafts < 60 else [one], [], kept=kept)
        one.raw = right
        check(layer, one)
    layer.run(function, [], [Piece(one, 9, True), Piece(other, 2)])  # what is pending, before a prompt's chunk
    check(layer, one)
    check(layer, other)


def test_what_drafts_left_is_folded_in_any_step(
    function: Callable[..., Tensor], device: str, rng: torch.Generator
) -> None:
    """Behind a step with drafts, up to 1 + drafts tokens are pending: for a row with drafts, for one without beside
    such, and where nobody takes any. A snapshot is written in the midst of them."""
    layer = Layer(rng, device, drafts=3)
    one, other = layer.sequence(90, 1), layer.sequence(90, 2)
    layer.run(function, [], [Piece(one, 61, True), Piece(other, 62, True)])
    snaps = {0: (64, 4), 1: (64, 5)}
    layer.run(function, [one, other], [], kept=[4, 3], snaps=snaps)  # 60 and 61 are certain, and folded
    assert layer.state[[4, 5]].isnan().all()
    layer.run(function, [one], [Piece(other, 1, True, 64, 5)], kept=[2], snaps=snaps)
    layer.run(function, [one], [Piece(other, 1, True)], kept=[3])
    layer.run(function, [one, other], [], kept=[1, 4])
    layer.drafts = 0
    for _ in range(2):
        layer.run(function, [one, other], [])
    for sequence, slot in ((one, 4), (other, 5)):
        check(layer, sequence)
        restored = Sequence(sequence.raw, sequence.gates, slot, 64, 64)
        layer.run(function, [], [Piece(restored, 9, True)])
        outputs, _ = recurrence(layer, sequence.raw[:73], sequence.gates[:73])
        torch.testing.assert_close(restored.outputs[0].double().cpu(), outputs[64:], rtol=1e-5, atol=1e-5)


def test_splits_at_multiples_of_64_are_bitwise_the_whole(
    function: Callable[..., Tensor], device: str, rng: torch.Generator
) -> None:
    layer = Layer(rng, device)
    whole, parts, company = layer.sequence(200, 1), layer.sequence(200, 2), layer.sequence(100, 3)
    parts.raw, parts.gates = whole.raw, whole.gates
    layer.run(function, [], [Piece(whole, 200, True)])
    layer.run(function, [], [Piece(parts, 64), Piece(company, 37)])
    layer.run(function, [], [Piece(company, 50), Piece(parts, 128)])
    layer.run(function, [], [Piece(parts, 8, True)])
    assert torch.equal(torch.cat(whole.outputs), torch.cat(parts.outputs))
    assert torch.equal(layer.state[1], layer.state[2])
    ring = torch.arange(192, 200, device=device) % layer.ring.shape[1]
    assert torch.equal(layer.ring[1, ring], layer.ring[2, ring])


@pytest.mark.parametrize("boundary", [64, 128])
@pytest.mark.parametrize("length", [129, 192])
def test_snapshot_of_a_prompt(
    function: Callable[..., Tensor], boundary: int, length: int, device: str, rng: torch.Generator
) -> None:
    layer = Layer(rng, device)
    one = layer.sequence(length + 9, 1)
    layer.run(function, [], [Piece(one, length, True, boundary, 4)])
    other = Sequence(one.raw, one.gates, 4, boundary, boundary)
    check(layer, Sequence(one.raw, one.gates, 4, boundary, boundary, [torch.cat(one.outputs)[:boundary]]))
    layer.run(function, [one], [Piece(other, length - boundary, True)])
    assert torch.equal(one.outputs[0][boundary:], other.outputs[0])


def test_snapshot_of_a_decode(function: Callable[..., Tensor], device: str, rng: torch.Generator) -> None:
    """Written as the fold passes the boundary, not before: its first WIDTH - 1 inputs come from the ring."""
    layer = Layer(rng, device)
    one, other = layer.sequence(80, 1), layer.sequence(80, 2)
    layer.run(function, [], [Piece(one, 62, True), Piece(other, 64, True)])
    snaps = {0: (64, 4), 1: (128, 5)}
    for _ in range(2):  # 61 → 62 → 63 folded
        layer.run(function, [one, other], [], snaps=snaps)
        assert layer.state[4].isnan().all()
    layer.run(function, [one, other], [], snaps=snaps)  # 64 folded
    kept = layer.ring[4, [p % layer.ring.shape[1] for p in range(64 - WIDTH + 1, 64)], : layer.channels]
    assert torch.equal(kept, one.raw[64 - WIDTH + 1 : 64])
    restored = Sequence(one.raw, one.gates, 4, 64, 64)
    layer.run(function, [one, other], [Piece(restored, 10, True)])
    check(layer, one)
    outputs, _ = recurrence(layer, one.raw[:74], one.gates[:74])
    torch.testing.assert_close(restored.outputs[0].double().cpu(), outputs[64:], rtol=1e-5, atol=1e-5)
    assert layer.state[5].isnan().all() and layer.ring[5].isnan().all()


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
def test_states_of_16_bits(
    function: Callable[..., Tensor], state_dtype: torch.dtype, device: str, rng: torch.Generator
) -> None:
    layer = Layer(rng, device, state_dtype=state_dtype)
    one = layer.sequence(90, 1)
    layer.run(function, [], [Piece(one, 64)])
    layer.run(function, [], [Piece(one, 20, True)])
    for _ in range(3):
        layer.run(function, [one], [])
    check(layer, one, 4 * torch.finfo(state_dtype).eps)


def test_a_state_is_forgotten_where_nothing_is_folded(
    function: Callable[..., Tensor], device: str, rng: torch.Generator
) -> None:
    """A new request's slot holds what another one left, and a first token that decodes folds nothing."""
    layer = Layer(rng, device)
    one, fresh = layer.sequence(20, 1), layer.sequence(20, 1)
    layer.run(function, [], [Piece(one, 17, True)])
    layer.run(function, [fresh], [])
    layer.run(function, [fresh], [])
    layer.run(function, [], [Piece(fresh, 4, True)])
    check(layer, fresh)
