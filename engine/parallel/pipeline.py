"""Stages of a model that is cut between layers, and how they reach each other: a ring of ranks.

The first ranks, those of rank 0, have the last stage: the engine's own process samples, as it does everywhere, so that
masks, results and log-probabilities need no way of their own. The next ones have the first stage, and so on. Hidden
states and sampled tokens then both go from each to the next:

    ranks    0 … (last stage) ─ tokens ─▶ first stage ─ hidden states ─▶ second stage ─ … ─▶ back to 0 …
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from .group import ALONE, Group
from .join import wrapped


class Ring:
    """This rank's links: from the one before it in the ring, and to the one behind."""

    # Of steps, that this process has begun: one with what comes in, one with what goes out; in every stage two a step.
    half_steps = 0

    def __init__(self, rank: int, size: int, num_stages: int) -> None:
        """Every rank has to call it; group members are numbered as in the world."""
        each = size // num_stages
        self._before, self._behind = (rank - each) % size, (rank + each) % size
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._most = 2 * (num_stages + 1)
        # A group for each link: what is sent one way must not wait for what comes the other way. That each has nothing
        # but sends is what they are for, and no reason for NCCL's warning.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        for source in range(size):
            target = (source + each) % size
            link = dist.new_group([source, target])
            if source == rank:
                self._out = link
            if target == rank:
                self._in = link

    def send(self, x: Tensor) -> None:
        """To the rank behind, which must receive as many elements; x must not change from here on."""
        work = dist.isend(x, self._behind, self._out)
        assert work is not None
        self._sends.append((work, x))
        # No more steps are in flight than half of this, with two transfers at most: what was sent before has been
        # received, or will be before its receiver waits for anything of ours.
        while len(self._sends) > self._most:
            self._sends.popleft()[0].wait()

    def receive(self, x: Tensor) -> Tensor:
        """Into x, from the rank before. On a card, the stream waits, not the host."""
        dist.recv(x, self._before, self._in)
        return x


@dataclass(frozen=True)
class Stage:
    """One part of a model's layers."""

    index: int = 0
    count: int = 1
    layers: range | None = None  # None: all
    ring: Ring | None = None  # None: it is only looked at

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def indices(self, num_layers: int) -> range:
        return range(num_layers) if self.layers is None else self.layers


WHOLE = Stage()


def stage_of(rank: int, size: int, num_stages: int) -> int:
    """Which stage a rank of `size` has."""
    return (rank // (size // num_stages) - 1) % num_stages


def form_ring(
    world: Group, num_stages: int, device: torch.device, symmetric: bool, layers: list[range], one_host: bool
) -> tuple[Group, Stage]:
    """→ the group that shares this rank's stage, and the stage. `layers`: of each stage. Every rank has to call it."""
    if num_stages == 1:
        return world, WHOLE
    rank, each = world.rank, world.size // num_stages
    mine: Group = ALONE
    for first in range(0, world.size if each > 1 else 0, each):
        ranks = range(first, first + each)
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine = wrapped(group, device, symmetric, ranks if one_host else None)
    index = stage_of(rank, world.size, num_stages)
    return mine, Stage(index, num_stages, layers[index], Ring(rank, world.size, num_stages))
