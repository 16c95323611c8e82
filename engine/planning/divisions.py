"""Over how many cards an engine is best divided, and how many engines hold a load: the fewest cards that do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..describe.divide import sizes
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..options.config import EngineConfig
from .card import HOST_CARDS
from .load import Result, Wanted
from .setup import Setup

MOST_ENGINES = 64  # that a server may have


@dataclass(frozen=True)
class Fleet:
    """So many engines alike, and what a load meets there."""

    setup: Setup
    replicas: int
    result: Result

    @property
    def cards(self) -> int:
        return self.setup.cards * self.replicas


def divisions(model: ModelConfig, config: EngineConfig) -> list[EngineConfig]:
    """The same on one card, and divided in each way that the model can be over the cards of one host: the fewest cards
    first, then the fewest stages."""
    whole = dataclasses.replace(config, tensor_parallel_size=1, pipeline_parallel_size=1)
    stages = len(model.layers) if model.foreign is None else 1
    pairs = [
        (ranks, count)
        for ranks in sizes(model, config.enable_expert_parallel)
        for count in range(1, min(stages, HOST_CARDS // ranks) + 1)
        if ranks <= HOST_CARDS
    ]
    return [
        dataclasses.replace(whole, tensor_parallel_size=ranks, pipeline_parallel_size=count)
        for ranks, count in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))
    ]


def fitting(configs: Iterable[EngineConfig], make: Callable[[EngineConfig], Setup]) -> list[Setup]:
    """Those that the cards' memory holds, of stages no more than that takes: more would bring an engine less than as
    many engines. Raises ConfigError, that of the last one, where there is none."""
    found: list[Setup] = []
    refused = ConfigError("nothing was asked for")
    for config in configs:
        if any(setup.ranks == config.tensor_parallel_size for setup in found):
            continue
        try:
            found.append(make(config))
        except ConfigError as error:
            refused = error
    if not found:
        raise refused
    return found


def fewest(
    setups: Sequence[Setup], wanted: Wanted, ask: Callable[[Setup, int], Result], guess: Callable[[Setup], int],
    most: int = MOST_ENGINES,
) -> tuple[Fleet | None, list[Fleet]]:  # fmt: skip
    """→ the fewest cards that meet what is wanted, of as many those with the least divided engines; all that were
    asked. setups: in the order of `divisions`; guess: engines that are likely to be needed; 0: no number is enough;
    `most`: engines that are asked, where more are likely to be needed none is."""
    best: Fleet | None = None
    asked: list[Fleet] = []

    def meets(setup: Setup, replicas: int) -> bool:
        nonlocal best
        result = ask(setup, replicas)
        asked.append(Fleet(setup, replicas, result))
        if met := wanted.held(result):
            best = asked[-1]
        return met

    for setup in setups:
        start = len(asked)
        if best is not None:
            below = min(most, (best.cards - 1) // setup.cards)
            _find_least(partial(meets, setup), below, below)
        elif 0 < (likely := guess(setup)) <= most:
            _find_least(partial(meets, setup), likely, most)
        asked[start:] = sorted(asked[start:], key=lambda fleet: fleet.replicas)
    return best, asked


def _find_least(meets: Callable[[int], bool], first: int, most: int) -> None:
    """Asks until it is known which of 1 to `most` is the least that meets: the last one that did. From `first` on in
    steps that double, then in halves of what is left, for a number that meets is taken to have none above it that does
    not. Nothing is asked twice."""
    too_few, enough = 0, most + 1
    count, step = first, 1
    while enough - too_few > 1:
        if meets(count):
            enough = count
        else:
            too_few = count
        if enough > most:
            count = min(most, too_few + step)
        elif too_few == 0:
            count = max(1, enough - step)
        else:
            count = (too_few + enough) // 2
        step *= 2
