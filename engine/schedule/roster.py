"""The unfinished requests: who waits, in which order, and who runs, on which row of the device tables."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from ..errors import require
from .request import Request, Status

Entry = tuple[int, float, int, Request]  # sorts by (priority, arrival, order of add): smaller runs first
# Of a tenant's first request: (priority, whether it has not begun, tokens served to the tenant, order of add, tenant).
# Who has begun and was preempted comes first.
Turn = tuple[int, bool, float, int, int]

LIKELY_ANSWER = 256  # tokens, where a request may have as many: few ask for what they get
REMEMBERED = 1 << 12  # tenants that do not wait, of whom it is known what they were served


class Line:
    """Of one tenant."""

    __slots__ = ("entries", "served", "turn")

    def __init__(self, served: float) -> None:
        self.entries: list[Entry] = []  # sorted
        self.served = served  # tokens, on the queue's clock
        self.turn: Turn | None = None  # as it stands among the others


class FairQueue:
    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}  # by tenant; none is empty
        self._turns: list[Turn] = []  # of each line, sorted
        self._served: dict[int, float] = {}  # of tenants without a line, while others wait
        self._clock = 0.0  # about what those who wait have been served
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry]:
        """In the order in which they would start."""
        yield from self.in_turn()

    def add(self, entry: Entry) -> None:
        tenant = entry[3].tenant
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = Line(max(self._clock_at(entry[0]), self._served.pop(tenant, 0.0)))
        insort(line.entries, entry)
        self._length += 1
        self._turn(tenant, line)

    def _clock_at(self, priority: int) -> float:
        """What those who wait at this priority have been served: the clock, which others' starts move as well, but no
        more than whoever of them has been served most."""
        index = bisect_left(self._turns, (priority + 1,))
        if index == 0 or self._turns[index - 1][0] != priority:
            return self._clock
        return min(self._clock, self._turns[index - 1][2])

    def remove(self, entry: Entry) -> None:
        """It has ended while it waited."""
        tenant = entry[3].tenant
        line = self._lines[tenant]
        del line.entries[bisect_left(line.entries, entry)]
        self._length -= 1
        self._turn(tenant, line)

    def start(self, entry: Entry) -> None:
        """It waits no longer; its tenant is served what it costs."""
        tenant, cost = entry[3].tenant, cost_of(entry[3])
        line = self._lines[tenant]
        if cost:
            # Those who join from now on are ahead of this tenant, and behind those who have waited, however many come.
            self._clock = max(self._clock, line.served) + cost / (len(self._lines) + 1)
            line.served += cost
        self.remove(entry)

    def settle(self, request: Request) -> None:
        """It has ended: its answer was longer than was likely, or shorter."""
        if request.first_scheduled is None:
            return  # nothing was charged
        tenant, difference = request.tenant, request.num_output_tokens - likely_answer(request)
        if (line := self._lines.get(tenant)) is not None:
            line.served += difference
            self._turn(tenant, line)
        elif tenant in self._served:
            self._served[tenant] += difference

    def in_turn(self) -> Iterator[Entry]:
        """In the order in which they would start, for as long as nothing joins and nothing ends. The one that has come
        last may be started; who was passed over counts as served, for those behind."""
        turns, index = self._turns[:], 0
        # Of tenants that have had a turn: their next one, and the position of its entry.
        later: list[tuple[Turn, int]] = []
        while index < len(turns) or later:
            if later and (index == len(turns) or later[0][0] < turns[index]):
                turn, position = heapq.heappop(later)
            else:
                turn, position = turns[index], 0
                index += 1
            tenant = turn[4]
            entries = self._lines[tenant].entries
            entry = entries[position]
            served = turn[2] + cost_of(entry[3])
            yield entry
            position += position < len(entries) and entries[position] is entry
            if position < len(entries):
                heapq.heappush(later, (turn_of(entries[position], served), position))

    def _turn(self, tenant: int, line: Line) -> None:
        """Where the tenant stands among the others, after a change of its line."""
        turn = turn_of(line.entries[0], line.served) if line.entries else None
        if turn == line.turn:
            return
        if line.turn is not None:
            del self._turns[bisect_left(self._turns, line.turn)]
        line.turn = turn
        if turn is not None:
            insort(self._turns, turn)
            return
        del self._lines[tenant]
        if not self._lines:  # whoever comes finds nobody to be compared with
            self._served.clear()
            self._clock = 0.0
            return
        self._served[tenant] = line.served
        if len(self._served) > REMEMBERED:
            del self._served[next(iter(self._served))]

    def check(self) -> None:
        """Raises InvariantError where a line or a turn is lost or out of order. O(requests)."""
        lines = self._lines
        require(all(line.entries == sorted(line.entries) for line in lines.values()), "queue out of order")
        require(all(line.entries and line.turn == turn_of(line.entries[0], line.served) for line in lines.values()),
                "a turn is not that of its line")  # fmt: skip
        require(self._turns == sorted(line.turn for line in lines.values() if line.turn), "turns out of order")
        require(self._length == sum(len(line.entries) for line in lines.values()), "queue miscounted")
        require(not self._served.keys() & lines.keys(), "a tenant is in two places")


def turn_of(entry: Entry, served: float) -> Turn:
    priority, _, number, request = entry
    return priority, request.first_scheduled is None, served, number, request.tenant


def likely_answer(request: Request) -> int:
    return min(request.sampling.max_tokens, LIKELY_ANSWER)


def cost_of(request: Request) -> int:
    """Tokens that its tenant is charged when it starts: for the first time."""
    return 0 if request.first_scheduled is not None else request.num_prompt_tokens + likely_answer(request)


class Roster:
    """A request waits or runs, with a row, until it is removed. Whoever moves it takes care of its blocks."""

    def __init__(self, num_rows: int, *, by_priority: bool) -> None:
        self.entries: dict[int, Entry] = {}  # of all, by id
        self.waiting = FairQueue()
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

    def start(self, entry: Entry) -> None:
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

    def _enqueue(self, entry: Entry) -> None:
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
