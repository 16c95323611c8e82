"""Threads for what takes long: short work passes long work, and what nobody waits for any more is not begun.

Keys and addresses have turns in both kinds, as requests have in the engine's queue: nobody's many texts or bodies are
in the way of another's one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from ..engine.link.turns import short_turns
from ..engine.schedule.fair_queue import Entry, FairQueue
from .errors import ApiError

T = TypeVar("T")

SHORT = 64 << 10  # characters: some 20 ms of tokenising
CHARACTERS_A_SECOND = 2_000_000  # about; longer work lets come first what comes so much later and is shorter
MAX_WAITING = 64 << 20  # characters of long work
NUM_THREADS = 4  # few: they compete with the event loop and, on the CPU, with the model itself

# Whose the request is that a task works on: see http/tenant.py. What a task gives to a lane is that tenant's.
TENANT: ContextVar[int] = ContextVar("tenant", default=0)


@dataclass(eq=False)
class Job:
    size: int
    tenant: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    since: float  # of the loop's clock
    waits: bool = True
    overrun = 0.0  # what it is about is known before

    @property
    def is_long(self) -> bool:
        return self.size > SHORT

    @property
    def cost(self) -> float:
        """Characters, as fairness counts."""
        return max(1, self.size)

    def run(self) -> Any:
        with short_turns() if self.is_long else contextlib.nullcontext():
            return self.work()


def _nothing() -> None:
    pass


class Lanes:
    """All but `run`'s work happens in the event loop. One thread is kept for short work."""

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
        self._held: Counter[int] = Counter()  # the same by tenant; those with none have no entry
        self._num_threads = num_threads
        self._num_long = 0  # threads at long work
        self._short: FairQueue[Job] = FairQueue()
        self._long: FairQueue[Job] = FairQueue()
        self._numbers = itertools.count()
        self._waited: set[asyncio.Future[Any]] = set()
        self._end_cause: Exception | None = None
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=what)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, whose time is about that of tokenising `size` characters. Whoever is cancelled leaves
        at once; work that was begun is done all the same. Raises ApiError (429) where too much waits, of whose tenant
        has most of it, and what `fail` was given.
        """
        if self._end_cause is not None:
            raise self._end_cause
        loop = asyncio.get_running_loop()
        job = Job(size, TENANT.get(), work, loop.create_future(), loop.time())
        if job.is_long:
            self._make_room(job)
        # Of one tenant the shorter of two long ones comes first, but none waits for ever.
        entry = (0, job.since + size / CHARACTERS_A_SECOND, next(self._numbers), job)
        self._lane(job).add(entry)
        self._count(job, 1)
        self._waited.add(job.done)
        self._begin()
        try:
            result: T = await job.done
            return result
        finally:
            self._waited.discard(job.done)
            self._leave(entry)

    def _lane(self, job: Job) -> FairQueue[Job]:
        return self._long if job.is_long else self._short

    def _count(self, job: Job, sign: int) -> None:
        """Long work waits from now on, or no longer."""
        if job.is_long:
            self.waiting_size += sign * job.size
            self._held[job.tenant] += sign * job.size
            if not self._held[job.tenant]:
                del self._held[job.tenant]

    def _make_room(self, job: Job) -> None:
        """For long work: who came last of the tenant with most of it gives way, as often as it takes. Raises ApiError
        (429) where that would be who comes, and then nobody has given way."""
        for entry in self._in_the_way(job):
            self._rejected()
            self._leave(entry)
            if not entry[3].done.done():
                entry[3].done.set_exception(self._full(entry[3]))

    def _in_the_way(self, job: Job) -> list[Entry[Job]]:
        size = self.waiting_size
        if not size or size + job.size <= MAX_WAITING:
            return []
        held, entries = self._held.copy(), defaultdict[int, list[Entry[Job]]](list)
        found: list[Entry[Job]] = []
        while size and size + job.size > MAX_WAITING:
            tenant = max(held, key=held.__getitem__, default=job.tenant)
            if held[tenant] <= held[job.tenant] + job.size:
                self._rejected()
                raise self._full(job)
            if not found:  # only now: most who are refused do not come so far
                for entry in sorted(self._long, key=lambda entry: entry[2]):
                    entries[entry[3].tenant].append(entry)
            latest = entries[tenant].pop()
            found.append(latest)
            size -= latest[3].size
            held[tenant] -= latest[3].size
        return found

    def _full(self, job: Job) -> ApiError:
        return ApiError(
            429,
            f"Too much text waits (to {self._what}): {self.waiting_size} characters, {self._held[job.tenant]} of this "
            f"key or address, this request brings {job.size}, and at most {MAX_WAITING} may wait; try again in 1 s.",
            type="rate_limit_error",
            code="queue_full",
            headers={"retry-after": "1"},
        )

    def _begin(self) -> None:
        while self.num_running < self._num_threads:
            room = self._num_threads > 1 + self._num_long or self._num_threads == 1
            lane = self._short or (self._long if room else None)
            if not lane:
                return
            entry = next(lane.in_turn())
            lane.start(entry)
            job = entry[3]
            job.waits = False
            self._count(job, -1)
            self.num_running += 1
            self._num_long += job.is_long
            loop = job.done.get_loop()
            self._waited_for(loop.time() - job.since)

            def ended(future: Future[Any], job: Job = job, loop: asyncio.AbstractEventLoop = loop) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._end, job, future)

            self._pool.submit(job.run).add_done_callback(ended)

    def _leave(self, entry: Entry[Job]) -> None:
        """It waits no longer, if it did, and its text is not kept. Idempotent."""
        job = entry[3]
        if job.waits:
            job.waits = False
            self._lane(job).remove(entry)
            self._count(job, -1)

    def _end(self, job: Job, future: Future[Any]) -> None:
        self.num_running -= 1
        self._num_long -= job.is_long
        self._begin()
        if job.done.done():
            return
        if (error := future.exception()) is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(future.result())

    def fail(self, error: Exception) -> None:
        """Whoever waits, or would, gets this instead."""
        self._end_cause = error
        for waiting in self._waited:
            if not waiting.done():
                waiting.set_exception(error)

    def close(self) -> None:
        """Waits for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
