"""What a rank does by itself, in seconds so far: while it does something, those who wait for it wait for a reason."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runner import ModelRunner

PAUSE = 1.0  # seconds between two calls, that a thread was seen to wait for a disk in
MOVED = 1 << 14  # bytes read or written in that time: what a process does beside waiting is less

Effort = Callable[[], float]


class Starting:
    """Of a rank that starts: its process computes (weights are copied by several threads), reads, or writes what it
    downloads. Slow disks and networks leave it waiting for minutes."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._moved = 0

    def __call__(self) -> float:
        moved = _bytes_moved()
        if moved - self._moved >= MOVED or _waits_for_disk(_threads()):
            self._waited += PAUSE
        self._moved = moved
        return time.process_time() + self._waited


class Computing:
    """Of the thread that computes steps on the CPU; those that serve beside it may have much to do while it hangs."""

    def __init__(self, thread: threading.Thread) -> None:
        assert thread.ident is not None and thread.native_id is not None, "it runs"
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._number = thread.native_id
        self._seconds = self._waited = 0.0

    def __call__(self) -> float:
        with contextlib.suppress(OSError):  # it has ended
            self._seconds = time.clock_gettime(self._clock)
        if _waits_for_disk([self._number]):  # its memory was swapped out
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
