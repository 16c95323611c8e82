"""When a step that does not end is one that never will, and whose fault that is."""

from __future__ import annotations

import sys

from ..link.plan import StepPlan
from .effort import BUSY, Effort
from .messages import Pulse

INTERVAL = 1.0  # seconds between two pulses
LIMIT = 7.0  # seconds of a step; with what it takes to end everybody, 10 from the hang to the engine's last word
LONGEST = 4.0  # times the longest step that was seen: on slow cards, that may be more
KEYS = 4096  # that a prompt's token attends to in the time in which all else is computed for it, or more
START_LIMIT = 180.0  # seconds while an engine starts: it may wait for the processes that compile kernels
IDLE = BUSY  # share of a core: a rank that computes takes more, one that waits takes less


def pulse(effort: Effort) -> Pulse:
    """Of this process. Once every INTERVAL."""
    dist = sys.modules.get("torch.distributed")  # importing it takes seconds, and there may be none yet
    joined = getattr(dist, "is_initialized", bool)()
    count = common = 0
    if dist is not None and joined:
        groups = tuple(dist.distributed_c10d._world.pg_map)  # of this rank: all, and those that share its stage
        from ..parallel.pipeline import Ring  # it imports torch, which is there by now

        count = sum(group._get_sequence_number_for_group() for group in groups)
        common = dist.group.WORLD._get_sequence_number_for_group() + Ring.half_steps
    return Pulse(count, effort(), common)


def step_limit(longest: float) -> float:
    """Seconds of a step on cards, the longest of which has taken so many: how busy they are, the host cannot see."""
    return max(LIMIT, LONGEST * longest)


def prompt_work(plan: StepPlan) -> int:
    """Of a step, in tokens times keys: what may make it many times as long as others. Its decodes, of a token each, are
    none of that."""
    prompts = zip(plan.num_tokens[plan.num_decodes :], plan.num_computed[plan.num_decodes :], strict=True)
    return sum(count * (KEYS + computed + count) for count, computed in prompts)


class StepLimit:
    """`step_limit` of the steps that have begun. One that has more work than any before, as the first chunk behind a
    long prefix that is cached, may take as much longer."""

    def __init__(self, longest: float, num_tokens: int) -> None:
        """Of a step of so many tokens, and few keys, that took `longest` seconds."""
        self._longest, self._most = longest, num_tokens * KEYS
        self._begun: list[int] = []  # their work
        self._growth = 1.0

    def begin(self, plan: StepPlan) -> int:
        """→ its work."""
        work = prompt_work(plan)
        self._begun.append(work)
        self._grow()
        return work

    def end(self, work: int, seconds: float | None) -> None:
        """A step of this work has ended; None: without a result."""
        self._begun.remove(work)
        if seconds is not None:
            self._longest, self._most = max(self._longest, seconds), max(self._most, work)
        self._grow()

    def _grow(self) -> None:
        self._growth = max(1.0, max(self._begun, default=0) / self._most)

    def __call__(self) -> float:
        """From any thread."""
        return step_limit(self._longest * self._growth)


class HangWatch:
    """Of the ranks of an engine. They hang where one is silent, or where all of them wait and none computes: a long
    step on the CPU, or a kernel that is compiled late, takes somebody's time.

    It counts its own ticks, not the clock: while this process was stopped, nobody could be heard.
    """

    def __init__(self, size: int, num_stages: int = 1) -> None:
        each = size // num_stages
        self._stages = [(rank // each - 1) % num_stages for rank in range(size)]
        self._pulses = [Pulse()] * size
        self._silent = [0.0] * size  # seconds
        self._pending = 0.0  # seconds without a step that ended
        self._waiting = 0.0  # of these the last ones, in which nobody computed
        self._worked = False  # somebody has, since the last tick
        self._fresh = [False] * size  # whether the last pulse is younger than the last progress
        self._done = -1

    def heard(self, rank: int, pulse: Pulse) -> None:
        if self._fresh[rank]:  # else some of it was for what has been done
            self._worked |= pulse.effort - self._pulses[rank].effort > IDLE * INTERVAL
        self._pulses[rank], self._silent[rank], self._fresh[rank] = pulse, 0.0, True

    def tick(self, mine: Pulse, busy: bool, done: int, limit: float) -> tuple[int, str] | None:
        """Once every INTERVAL. `mine`: of rank 0; `busy`: they have something to do; `done`: what they have ended.
        → (rank that keeps the others waiting, what it does) after `limit` seconds without progress."""
        self._silent = [seconds + INTERVAL for seconds in self._silent]
        self.heard(0, mine)
        goes_on = not busy or done != self._done
        self._pending = 0.0 if goes_on else self._pending + INTERVAL
        self._waiting = 0.0 if goes_on or self._worked else self._waiting + INTERVAL
        self._done, self._worked = done, False
        if goes_on:
            self._fresh = [rank == 0 for rank in range(len(self._fresh))]
        longest = max(range(len(self._silent)), key=self._silent.__getitem__)
        if self._pending >= limit and self._silent[longest] >= limit:
            return longest, f"has been silent for {self._silent[longest]:.0f} s"
        if self._waiting < limit:
            return None
        # Whoever waits for a stage has come as far as that, and is behind it. Collectives tell ranks of a stage apart:
        # another one has more of them in a step, or fewer, by its layers.
        reached = [(p.common, stage, p.collectives) for p, stage in zip(self._pulses, self._stages, strict=True)]
        return min(range(len(reached)), key=reached.__getitem__), f"has not gone on for {self._waiting:.0f} s"
