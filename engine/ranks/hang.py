"""When a step that does not end is one that never will, and whose fault that is."""

from __future__ import annotations

import sys

from .effort import BUSY, Effort
from .messages import Pulse

INTERVAL = 1.0  # seconds between two pulses
LIMIT = 7.0  # seconds of a step; with what it takes to end everybody, 10 from the hang to the engine's last word
LONGEST = 4.0  # times the longest step that was seen: on slow cards, that may be more
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
