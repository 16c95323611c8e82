"""What a rank does by itself, in seconds so far: while it does something, those who wait for it wait for a reason."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

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
