"""When a step that does not end is one that never will, and whose fault that is."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..link.plan import StepPlan
from .messages import Pulse

if TYPE_CHECKING:
    from ..step.runner import ModelRunner

PAUSE = 1.0  # seconds between two calls, that a thread was seen to wait for a disk in
MOVED = 1 << 14  # bytes read or written in that time: what a process does beside waiting is less
BUSY = 0.02  # share of a core: who computes takes more
# Some effort nothing may come of, and it counts for so many seconds in a row:
STUCK = 300.0  # a wait for a disk of which nothing is read: a server that is started again has answered by then
ALONE = 600.0  # computing, at the start, while nothing is read or written: so does who waits for a card in a loop

Effort = Callable[[], float]


class Stretch:
    """Seconds in a row of what counts for a time only."""

    def __init__(self, limit: float) -> None:
        self._left = self._limit = limit

    def counts(self, goes_on: bool) -> bool:
        """Once every PAUSE. Whether it goes on, and still counts."""
        self._left = self._left - PAUSE if goes_on else self._limit
        return goes_on and self._left >= 0


class Starting:
    """Of a rank that starts: its process computes (weights are copied by several threads), reads, or writes what it
    downloads. Slow disks and networks leave it waiting for minutes."""

    def __init__(self) -> None:
        self._seconds = self._counted = 0.0
        self._moved = 0
        self._stuck, self._alone = Stretch(STUCK), Stretch(ALONE)

    def __call__(self) -> float:
        moved, seconds = _bytes_moved(), time.process_time()
        moves, computed = moved - self._moved >= MOVED, seconds - self._seconds
        if self._alone.counts(computed > BUSY * PAUSE and not moves) or moves or computed <= BUSY * PAUSE:
            self._counted += computed
        if self._stuck.counts(not moves and _waits_for_disk(_threads())) or moves:
            self._counted += PAUSE
        self._moved, self._seconds = moved, seconds
        return self._counted


class Computing:
    """Of the thread that computes steps on the CPU; those that serve beside it may have much to do while it hangs."""

    def __init__(self, thread: threading.Thread) -> None:
        assert thread.ident is not None and thread.native_id is not None, "it runs"
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._number = thread.native_id
        self._seconds = self._waited = 0.0
        self._stuck = Stretch(STUCK)

    def __call__(self) -> float:
        before = self._seconds
        with contextlib.suppress(OSError):  # it has ended
            self._seconds = time.clock_gettime(self._clock)
        idle = self._seconds - before <= BUSY * PAUSE
        if self._stuck.counts(idle and _waits_for_disk([self._number])):  # its memory was swapped out
            self._waited += PAUSE
        return self._seconds + self._waited


def stepping(runner: ModelRunner, thread: threading.Thread) -> Effort:
    """Of a rank that serves: `thread` launches its steps. Those on a card are no work of the host's, whose thread may
    well spin while it waits; but late kernels are compiled there."""
    return (lambda: runner.compiling_seconds) if runner.device.type == "cuda" else Computing(thread)


def _threads() -> Iterable[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    return []


def _waits_for_disk(threads: Iterable[int]) -> bool:
    """Also for one behind a network: whether one of them is in what Linux calls uninterruptible sleep."""
    for number in threads:
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/self/task/{number}/stat").read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


def _bytes_moved() -> int:
    """By this process, from disks and into files."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"]) + int(lines["wchar"])
    return 0


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
