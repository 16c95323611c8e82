"""Threads for what takes long: short work passes long work, and what nobody waits for any more is not begun."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import ApiError

T = TypeVar("T")

SHORT = 64 << 10  # characters: some 20 ms of tokenising
CHARACTERS_A_SECOND = 2_000_000  # about; longer work lets come first what comes so much later and is shorter
MAX_WAITING = 64 << 20  # characters of long work
USUAL_TURN = sys.getswitchinterval()  # seconds
SHORT_TURN = 0.0005  # of the interpreter's lock, beside long work
NUM_THREADS = 4  # few: they compete with the event loop and, on the CPU, with the model itself


@dataclass(order=True)
class Job:
    rank: float  # seconds; the lowest is next
    number: int
    size: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)
    since: float = field(compare=False)  # of the loop's clock
    begun: bool = field(default=False, compare=False)


def _nothing() -> None:
    pass


class Lanes:
    """All but `run`'s work happens in the event loop. One thread is kept for short work."""

    num_long = 0  # threads at long work, of all lanes

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        rejected: Callable[[], None] = _nothing,
        waited_for: Callable[[float], None] = lambda seconds: None,
        what: str = "tokenise",
    ) -> None:
        """`rejected` counts those for whose text there is no room, `waited_for` hears how long the others had none of
        the threads, `what` is done there: tokenise or read."""
        self._what = what
        self._rejected = rejected
        self._waited_for = waited_for
        self.num_running = 0  # threads at work
        self.waiting_size = 0  # characters of long work that waits
        self._num_threads = num_threads
        self._num_long = 0  # threads at long work
        self._short: list[Job] = []
        self._long: list[Job] = []
        self._numbers = itertools.count()
        self._waited: set[asyncio.Future[Any]] = set()
        self._end_cause: Exception | None = None
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=what)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, whose time is about that of tokenising `size` characters. Whoever is cancelled leaves
        at once; work that was begun is done all the same. Raises ApiError (429) where too much waits, and what `fail`
        was given.
        """
        if self._end_cause is not None:
            raise self._end_cause
        loop = asyncio.get_running_loop()
        is_long = size > SHORT
        if is_long and self.waiting_size and self.waiting_size + size > MAX_WAITING:
            self._rejected()
            raise ApiError(
                429,
                f"Too much text waits (to {self._what}): {self.waiting_size} characters, this request brings {size}, "
                f"and at most {MAX_WAITING} may wait; try again in 1 s.",
                type="rate_limit_error",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        job = Job(
            loop.time() + size / CHARACTERS_A_SECOND, next(self._numbers), size, work, loop.create_future(), loop.time()
        )  # fmt: skip
        heapq.heappush(self._long if is_long else self._short, job)
        self.waiting_size += size * is_long
        self._waited.add(job.done)
        self._begin()
        try:
            result: T = await job.done
            return result
        finally:
            self._waited.discard(job.done)
            if not job.begun:
                job.begun = True
                job.work = _nothing  # it stays in its lane until its turn comes: its text need not
                self.waiting_size -= size * is_long

    def _begin(self) -> None:
        while self.num_running < self._num_threads:
            room = self._num_threads > 1 + self._num_long or self._num_threads == 1
            lane = self._short or (self._long if room else None)
            if not lane:
                return
            job = heapq.heappop(lane)
            if job.begun:  # its client has left
                continue
            job.begun = True
            is_long = job.size > SHORT
            self.waiting_size -= job.size * is_long
            self.num_running += 1
            self._count_long(is_long)
            loop = job.done.get_loop()
            self._waited_for(loop.time() - job.since)

            def ended(future: Future[Any], job: Job = job, loop: asyncio.AbstractEventLoop = loop) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._end, job, future)

            self._pool.submit(job.work).add_done_callback(ended)

    def _end(self, job: Job, future: Future[Any]) -> None:
        self.num_running -= 1
        self._count_long(-(job.size > SHORT))
        self._begin()
        if job.done.done():
            return
        if (error := future.exception()) is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(future.result())

    def _count_long(self, change: int) -> None:
        """Beside long work the event loop asks for the interpreter's lock again and again, each time for a turn's
        length and for each thread that waits with it: turns are short then."""
        self._num_long += change
        Lanes.num_long += change
        sys.setswitchinterval(SHORT_TURN if Lanes.num_long else USUAL_TURN)

    def fail(self, error: Exception) -> None:
        """Whoever waits, or would, gets this instead."""
        self._end_cause = error
        for waiting in self._waited:
            if not waiting.done():
                waiting.set_exception(error)

    def close(self) -> None:
        """Waits for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
