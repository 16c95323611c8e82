"""Short convolutions between gates, in ragged pieces against the whole sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vserve.kernels.state import gated_conv as module
from vserve.kernels.state.step import StateStep

from .states import Piece, Sequence, Stepped

PATHS = {"torch": module.gated_conv_torch, "triton": module.gated_conv_triton}
CHANNELS, WIDTH = 150, 3


class GatedConv(Stepped):
    raw_size, out_shape, dtype = 3 * CHANNELS, (CHANNELS,), torch.float32

    def __init__(self, rng: torch.Generator, device: str, biased: bool = False, drafts: int = 0) -> None:
        self.rng, self.device, self.drafts = rng, device, drafts
        self.weight = torch.randn(CHANNELS, WIDTH, generator=rng).to(device)
        self.bias = torch.randn(CHANNELS, generator=rng).to(device) if biased else None
        ring = 1 << (WIDTH - 1 + 2 * (1 + drafts) - 1).bit_length()
        self.ring = torch.full((8, ring, CHANNELS), float("nan"), device=device)

    def call(self, function: Callable[..., Tensor], raw: Tensor, gates: Tensor, step: StateStep) -> Tensor:
        return function(raw, self.weight, self.bias, self.ring, step)

    def check(self, one: Sequence, first: int = 0) -> None:
        """All outputs so far, the first of which is this position's."""
        before, behind, x = one.raw[: one.computed].double().chunk(3, 1)
        full = torch.cat((before.new_zeros(WIDTH - 1, CHANNELS), before * x))
        wide = sum(full[tap : tap + one.computed] * self.weight[:, tap].double() for tap in range(WIDTH))
        wide = wide if self.bias is None else wide + self.bias
        torch.testing.assert_close(torch.cat(one.outputs).double(), (wide * behind)[first:], rtol=1e-5, atol=1e-5)


@pytest.fixture(params=PATHS)
def function(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return PATHS[request.param]


@pytest.mark.parametrize("biased", [False, True])
def test_prompts_and_decodes(function: Callable[..., Tensor], biased: bool, device: str, rng: torch.Generator) -> None:
    layer = GatedConv(rng, device, biased)
    first, second, third = layer.sequence(90, 3), layer.sequence(150, 7), layer.sequence(5, 1)
    layer.run(function, [], [Piece(first, 70, True), Piece(second, 64), Piece(third, 1, True)], tokens=140)
    layer.run(function, [first, third], [Piece(second, 1)], padding=(2, 1))
    layer.run(function, [third, first], [Piece(second, 70, True)], padding=(1, 0), tokens=77)
    for _ in range(2):
        layer.run(function, [first, second], [], padding=(3, 0))
    for one in (first, second, third):
        layer.check(one)
    assert layer.ring[[0, 2, 4, 5, 6]].isnan().all()  # nobody writes what padding points to


@pytest.mark.parametrize("drafts", [1, 3])
def test_what_drafts_leave_behind_is_overwritten(
    function: Callable[..., Tensor], drafts: int, device: str, rng: torch.Generator
) -> None:
    layer = GatedConv(rng, device, drafts=drafts)
    one = layer.sequence(60, 2)
    layer.run(function, [], [Piece(one, 11, True)])
    wrong = one.raw.clone()
    for step in range(4):
        kept, right = 1 + step % (1 + drafts), one.raw.clone()
        one.raw[one.computed + kept :] = 7 * wrong[one.computed + kept :]  # drafts that will not hold
        layer.run(function, [one], [], kept=[kept])
        one.raw = right
        layer.check(one)
    layer.run(function, [], [Piece(one, 9, True)])
    layer.check(one)


def test_snapshots(function: Callable[..., Tensor], device: str, rng: torch.Generator) -> None:
    """Of a prompt, and of a decode as the fold passes the boundary."""
    layer = GatedConv(rng, device)
    one, other = layer.sequence(100, 1), layer.sequence(100, 2)
    layer.run(function, [], [Piece(one, 70, True, 64, 4), Piece(other, 63, True)])
    for _ in range(3):
        layer.run(function, [other, one], [], snaps={0: (64, 5)})
    for slot, source in ((4, one), (5, other)):
        restored = Sequence(source.raw, source.gates, slot, 64, 64)
        layer.run(function, [restored], [])
        layer.check(restored, 64)
    layer.check(one)
    layer.check(other)
