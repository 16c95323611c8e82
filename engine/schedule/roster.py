"""The unfinished requests: who waits, in which order, and who runs, on which row of the device tables."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import require
from .fair_queue import Entry, FairQueue
from .request import Request, Status


class Roster:
    """A request waits or runs, with a row, until it is removed. Whoever moves it takes care of its blocks."""

    def __init__(self, num_rows: int, *, by_priority: bool) -> None:
        self.entries: dict[int, Entry[Request]] = {}  # of all, by id
        self.waiting: FairQueue[Request] = FairQueue()
        self.running: dict[int, Request] = {}  # in the order of admission
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.num_constrained = 0  # with a grammar
        self.num_waiting_tokens = 0  # of the queue, as long as each request was when it joined
        self._num_rows = num_rows
        self._by_priority = by_priority
        self._num_added = 0
        self._lengths: dict[int, int] = {}  # by id, what each request in the queue counts for

    def add(self, request: Request) -> None:
        """Into the queue."""
        assert request.id not in self.entries, f"request id {request.id} is in use"
        rank = (request.priority, request.arrival) if self._by_priority else (0, 0.0)
        entry = (*rank, self._num_added, request)
        self._num_added += 1
        self.entries[request.id] = entry
        self.num_constrained += request.grammar is not None
        self._enqueue(entry)

    def find(self, ids: Iterable[int]) -> list[Request]:
        """Each once; ids that are unknown, or of finished requests, are passed over."""
        return [self.entries[id][3] for id in dict.fromkeys(ids) if id in self.entries]

    def start(self, entry: Entry[Request]) -> None:
        """This one of the queue runs from now on. There has to be a free row."""
        request = entry[3]
        self.waiting.start(entry)
        self._uncount(request)
        request.status, request.row = Status.RUNNING, self.free_rows.pop()
        self.running[request.id] = request

    def requeue(self, request: Request) -> None:
        """It runs no longer, and waits where its rank puts it."""
        self._leave_row(request)
        request.status = Status.WAITING
        self._enqueue(self.entries[request.id])

    def remove(self, request: Request) -> None:
        """It has ended."""
        if request.status is Status.RUNNING:
            self._leave_row(request)
        else:
            self.waiting.remove(self.entries[request.id])
            self._uncount(request)
        self.waiting.settle(request)
        del self.entries[request.id]
        self.num_constrained -= request.grammar is not None
        request.status = Status.FINISHED

    def least_important(self) -> Request:
        """Of those that run."""
        return max(self.entries[id] for id in self.running)[3]

    def check(self) -> None:
        """Raises InvariantError where a request is lost or in two places, or a row is. O(requests)."""
        waiting = [entry[3] for entry in self.waiting]
        self.waiting.check()
        require(sorted(self.entries) == sorted([*self.running, *(r.id for r in waiting)]), "lost, or in two places")
        rows = [row_of(request) for request in self.running.values()] + self.free_rows
        require(sorted(rows) == list(range(self._num_rows)), "a row was lost or given out twice")
        for request in waiting:
            outside = request.row is None and request.num_computed_tokens == 0
            require(request.status is Status.WAITING and outside, f"{request}: in the queue, but not waiting")
        require(all(r.status is Status.RUNNING for r in self.running.values()), "on a row, but not running")
        require(self._lengths.keys() == {r.id for r in waiting}, "lengths of requests that do not wait")
        require(self.num_waiting_tokens == sum(self._lengths.values()), "waiting tokens miscounted")

    def _enqueue(self, entry: Entry[Request]) -> None:
        request = entry[3]
        self.waiting.add(entry)
        # Remembered: a request that was preempted grows by its samples in flight while it waits.
        self._lengths[request.id] = length = len(request.token_ids)
        self.num_waiting_tokens += length

    def _uncount(self, request: Request) -> None:
        self.num_waiting_tokens -= self._lengths.pop(request.id)

    def _leave_row(self, request: Request) -> None:
        """Rows, as blocks, are free at once: whoever gets one is computed after the plans in flight (stream order)."""
        del self.running[request.id]
        self.free_rows.append(row_of(request))
        request.row = None


def row_of(request: Request) -> int:
    assert request.row is not None, f"{request} has no row"
    return request.row
