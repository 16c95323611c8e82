"""Runs plans on several ranks: the others are sent what rank 0 does, a moment before it does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial

from ..link.plan import StepPlan, StepResult
from ..step.executor import ThreadExecutor
from ..step.mask import TokenMask
from .hang import Effort, StepLimit, step_limit
from .messages import Execute, Follow, Settle
from .peers import Peers, RankLost


class RanksExecutor:
    """Results are rank 0's, which samples. A step that fails on one rank leaves the others in the middle of a
    collective: none can follow it."""

    def __init__(
        self, mine: ThreadExecutor, peers: Peers, effort: Effort, limit: StepLimit, stages: bool = False
    ) -> None:
        """`mine`: of rank 0, as is `effort`. limit: of steps on cards. `stages`: there are some."""
        self._mine = mine
        self._peers = peers
        self._executes = False  # the plan executed last has rows, and so went to the others
        self._num_begun = self._num_done = 0
        self._failed, self._stages = False, stages
        self._limit, self._work = limit, 0  # of the plan executed last
        on_cards = mine.asynchronous
        peers.watch_steps(
            lambda: (self._num_begun > self._num_done, self._num_done),
            effort,
            limit if on_cards else lambda: step_limit(0.0),
        )

    def execute(self, plan: StepPlan) -> None:
        self._executes = bool(plan.rows)
        self._work = self._limit.begin(plan)
        if self._executes:
            self._peers.send(Execute(plan))
        self._mine.execute(plan)

    def sample(self, mask: TokenMask | None = None) -> None:
        if self._executes:
            self._peers.send(Follow(mask.postponed, mask.cuts, mask.limits) if mask is not None else Follow())
        self._mine.sample(mask)
        self._num_begun += 1
        self._mine.newest.add_done_callback(partial(self._ended, self._work))

    def result(self) -> Awaitable[StepResult]:
        return self._mine.result()

    async def wait(self, seconds: float) -> bool:
        return await self._mine.wait(seconds)

    def recover(self, error: Exception) -> None:
        self._failed = True
        raise RankLost(f"rank 0 failed in a step, and no other can go on: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        if not self._failed and not self._peers.lost:
            self._mine.close()  # its steps need the others

    def _ended(self, work: int, step: asyncio.Future[StepResult]) -> None:
        self._num_done += 1
        if self._stages and self._num_done == self._num_begun:
            self._peers.send(Settle())
        ended = not step.cancelled() and step.exception() is None
        self._limit.end(work, step.result().device_seconds if ended else None)
