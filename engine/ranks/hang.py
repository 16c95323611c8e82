"""When a step that does not end is one that never will, and whose fault that is."""

from __future__ import annotations

import sys
import time

from .messages import Pulse

INTERVAL = 1.0  # seconds between two pulses
LIMIT = 7.0  # seconds of a step; with what it takes to end everybody, 10 from the hang to the engine's last word
START_LIMIT = 180.0  # seconds while an engine starts: it may wait for a disk, or for the processes that compile kernels
SETTLING = 2.0  # seconds until pulses are heard that were counted after the last progress
IDLE = 0.02  # share of a core: a rank that computes takes more, one that waits takes less


def pulse() -> Pulse:
    """Of this process."""
    dist = sys.modules.get("torch.distributed")  # importing it takes seconds, and there may be none yet
    joined = getattr(dist, "is_initialized", bool)()
    count = dist.group.WORLD._get_sequence_number_for_group() if dist is not None and joined else 0
    return Pulse(count, time.process_time())


class HangWatch:
    """Of the ranks of an engine. They hang where one is silent, or where all of them wait and none computes: a long
    step on the CPU, or a kernel that is compiled late, takes somebody's time.

    It counts its own ticks, not the clock: while this process was stopped, nobody could be heard.
    """

    def __init__(self, size: int) -> None:
        self._pulses = [Pulse()] * size
        self._silent = [0.0] * size  # seconds
        self._waiting = 0.0  # seconds without progress
        self._before: list[Pulse] = []  # soon after that began
        self._done = -1

    def heard(self, rank: int, pulse: Pulse) -> None:
        self._pulses[rank], self._silent[rank] = pulse, 0.0

    def tick(self, mine: Pulse, busy: bool, done: int, limit: float) -> tuple[int, str] | None:
        """Once every INTERVAL. `mine`: of rank 0; `busy`: they have something to do; `done`: what they have ended.
        → (rank that keeps the others waiting, what it does) after `limit` seconds without progress."""
        self._silent = [seconds + INTERVAL for seconds in self._silent]
        self.heard(0, mine)
        self._waiting = self._waiting + INTERVAL if busy and done == self._done else 0.0
        self._done = done
        if self._waiting <= SETTLING:
            self._before = list(self._pulses)
        if self._waiting < limit:
            return None
        longest = max(range(len(self._silent)), key=self._silent.__getitem__)
        if self._silent[longest] >= limit:
            return longest, f"has been silent for {self._silent[longest]:.0f} s"
        spent = (now.cpu_seconds - then.cpu_seconds for now, then in zip(self._pulses, self._before, strict=True))
        if max(spent) > IDLE * (self._waiting - SETTLING):
            self._waiting = 0.0  # somebody computes
            return None
        reached = [pulse.collectives for pulse in self._pulses]
        return min(range(len(reached)), key=reached.__getitem__), f"has not gone on for {self._waiting:.0f} s"
