"""The unfinished requests: who waits, in which order, and who runs, on which row of the device tables."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from .request import Request, Status

Entry = tuple[int, float, int, Request]  # sorts by (priority, arrival, order of add): smaller runs first


class Roster:
    """A request waits or runs, with a row, until it is removed. Whoever moves it takes care of its blocks."""

    def __init__(self, num_rows: int, *, by_priority: bool) -> None:
        self.entries: dict[int, Entry] = {}  # of all, by id
        self.waiting: list[Entry] = []  # sorted; a preempted request sorts before all that came after it
        self.running: dict[int, Request] = {}  # in the order of admission
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self._num_rows = num_rows
        self._by_priority = by_priority
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Into the queue."""
        assert request.id not in self.entries, f"request id {request.id} is in use"
        rank = (request.priority, request.arrival) if self._by_priority else (0, 0.0)
        entry = (*rank, self._num_added, request)
        self._num_added += 1
        self.entries[request.id] = entry
        insort(self.waiting, entry)

    def find(self, ids: Iterable[int]) -> list[Request]:
        """Each once; ids that are unknown, or of finished requests, are passed over."""
        return [self.entries[id][3] for id in dict.fromkeys(ids) if id in self.entries]

    def backlog(self, enough: int) -> int:
        """Tokens that wait; of those beyond `enough`, no more than one request's: a queue may be very long."""
        num_tokens = 0
        for entry in self.waiting:
            num_tokens += len(entry[3].token_ids)
            if num_tokens >= enough:
                break
        return num_tokens

    def start(self) -> Request:
        """The head of the queue runs from now on. There has to be a free row."""
        request = self.waiting.pop(0)[3]
        request.status, request.row = Status.RUNNING, self.free_rows.pop()
        self.running[request.id] = request
        return request

    def requeue(self, request: Request) -> None:
        """It runs no longer, and waits where its rank puts it."""
        self._leave_row(request)
        request.status = Status.WAITING
        insort(self.waiting, self.entries[request.id])

    def remove(self, request: Request) -> None:
        """It has ended."""
        if request.status is Status.RUNNING:
            self._leave_row(request)
        else:
            del self.waiting[bisect_left(self.waiting, self.entries[request.id])]
        del self.entries[request.id]
        request.status = Status.FINISHED

    def least_important(self) -> Request:
        """Of those that run."""
        return max(self.entries[id] for id in self.running)[3]

    def check(self) -> None:
        """Raises AssertionError where a request is lost or in two places, or a row is. O(requests)."""
        waiting = [entry[3] for entry in self.waiting]
        assert self.waiting == sorted(self.waiting), "queue out of order"
        assert sorted(self.entries) == sorted([*self.running, *(r.id for r in waiting)]), "lost, or in two places"
        rows = [row_of(request) for request in self.running.values()] + self.free_rows
        assert sorted(rows) == list(range(self._num_rows)), "a row was lost or given out twice"
        for request in waiting:
            assert request.status is Status.WAITING and request.row is None and request.num_computed_tokens == 0
        assert all(request.status is Status.RUNNING for request in self.running.values())

    def _leave_row(self, request: Request) -> None:
        """Rows, as blocks, are free at once: whoever gets one is computed after the plans in flight (stream order)."""
        del self.running[request.id]
        self.free_rows.append(row_of(request))
        request.row = None


def row_of(request: Request) -> int:
    assert request.row is not None, f"{request} has no row"
    return request.row
