"""Grammars that wait to be compiled: whose turn it is."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from .constraint import Compile, Compiled

NUM_CHILDREN = 2  # compilations at once
LONG = 64 * 1024  # characters of a source, from which its compilation may take seconds
# Of the children, so many may have long jobs: a short one never waits for those alone.
MAX_LONG = NUM_CHILDREN - 1
OVERDUE = 10.0  # seconds of waiting, after which a job no longer gives way to shorter ones of its owner


@dataclass(eq=False)
class Job:
    """A grammar that is to be compiled, or is being compiled."""

    message: Compile
    owner: Hashable  # whose request asked first; "" where nobody can be told from others
    result: asyncio.Future[Compiled]
    since: float = field(default_factory=time.monotonic)
    is_wanted: bool = True  # somebody waits for it
    is_running: bool = False  # a child has it
    deaths: int = 0  # of the compiler while a child had it

    @property
    def size(self) -> int:
        """Characters of the source."""
        return len(self.message.constraint.text)

    @property
    def is_long(self) -> bool:
        return self.size >= LONG


class CompileQueue:
    """Round robin over owners, those first who have the fewest running; of one owner's jobs the shortest first."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[Job]] = {}  # by owner, whose turn is next first; no list is empty

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain.from_iterable(list(self._waiting.values()))

    def add(self, job: Job) -> None:
        self._waiting.setdefault(job.owner, []).append(job)

    def remove(self, job: Job) -> None:
        jobs = self._waiting[job.owner]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.owner]

    def take(self, running: Collection[Job]) -> Job | None:
        """The next one to run beside `running`; None where nothing waits, or only what has to wait for these."""
        share = Counter(job.owner for job in running)
        may_be_long = sum(job.is_long for job in running) < MAX_LONG
        for owner in sorted(self._waiting, key=share.__getitem__):
            jobs = [job for job in self._waiting[owner] if may_be_long or not job.is_long]
            if jobs:
                overdue = time.monotonic() - OVERDUE
                job = min(jobs, key=lambda job: (job.since > overdue, job.size))
                self.remove(job)
                if (others := self._waiting.pop(owner, None)) is not None:
                    self._waiting[owner] = others  # behind the other owners
                return job
        return None

    def greediest(self, newcomer: Hashable) -> Job | None:
        """The newest job of the owner with the most, where that would still have no fewer than `newcomer` if it gave
        way to one of theirs; otherwise None."""
        owner = max(self._waiting, key=lambda owner: len(self._waiting[owner]), default=newcomer)
        if len(self._waiting.get(owner, ())) <= len(self._waiting.get(newcomer, ())) + 1:
            return None
        return self._waiting[owner][-1]
