"""Who waits, and who of them is next: between tenants whoever has been served least, and of one tenant whoever came
first. With one tenant that is the order in which they came. Requests wait so for the engine, and in the server texts
and bodies for a thread (server/lanes.py).

It is start-time fair queueing. What a tenant has been served is charged when a request starts, of its answer only what
it is likely to have; the rest follows when it has ended. A tenant that joins counts as served as much as those who
wait: it neither pays for the time before nor is paid for it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from ..errors import require


class Waiting(Protocol):
    tenant: int

    @property
    def cost(self) -> float:
        """What its tenant is charged when it starts; 0: it has begun, and was charged then."""

    @property
    def overrun(self) -> float:
        """How much more than it was charged it has cost."""


T = TypeVar("T", bound=Waiting)
Entry = tuple[int, float, int, T]  # sorts by (priority, arrival, order of add): smaller runs first
# Of a tenant's first request: (priority, whether it has not begun, what the tenant was served, order of add, tenant).
# Who has begun and was preempted comes first.
Turn = tuple[int, bool, float, int, int]

REMEMBERED = 1 << 12  # tenants that do not wait, of whom it is known what they were served


class Line(Generic[T]):
    """Of one tenant."""

    __slots__ = ("entries", "served", "turn")

    def __init__(self, served: float) -> None:
        self.entries: list[Entry[T]] = []  # sorted
        self.served = served  # on the queue's clock
        self.turn: Turn | None = None  # as it stands among the others


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._lines: dict[int, Line[T]] = {}  # by tenant; none is empty
        self._turns: list[Turn] = []  # of each line, sorted
        self._served: dict[int, float] = {}  # of tenants without a line, while others wait
        self._clock = 0.0  # about what those who wait have been served
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry[T]]:
        """In the order in which they would start."""
        yield from self.in_turn()

    def add(self, entry: Entry[T]) -> None:
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

    def remove(self, entry: Entry[T]) -> None:
        """It has ended while it waited."""
        tenant = entry[3].tenant
        line = self._lines[tenant]
        del line.entries[bisect_left(line.entries, entry)]
        self._length -= 1
        self._turn(tenant, line)

    def start(self, entry: Entry[T]) -> None:
        """It waits no longer; its tenant is served what it costs."""
        tenant, cost = entry[3].tenant, entry[3].cost
        line = self._lines[tenant]
        if cost:
            # Those who join from now on are ahead of this tenant, and behind those who have waited, however many come.
            self._clock = max(self._clock, line.served) + cost / (len(self._lines) + 1)
            line.served += cost
        self.remove(entry)

    def settle(self, waiting: T) -> None:
        """It has ended: its answer was longer than was likely, or shorter."""
        tenant, difference = waiting.tenant, waiting.overrun
        if (line := self._lines.get(tenant)) is not None:
            line.served += difference
            self._turn(tenant, line)
        elif tenant in self._served:
            self._served[tenant] += difference

    def in_turn(self) -> Iterator[Entry[T]]:
        """In the order in which they would start, for as long as nothing joins and nothing ends. The one that has come
        last may be started; who was passed over counts as served, for those behind."""
        turns, index = self._turns[:], 0
        later: list[tuple[Turn, int]] = []  # of tenants that have had a turn: their next one, and its place in the line
        while index < len(turns) or later:
            if later and (index == len(turns) or later[0][0] < turns[index]):
                turn, position = heapq.heappop(later)
            else:
                turn, position = turns[index], 0
                index += 1
            tenant = turn[4]
            entries = self._lines[tenant].entries
            entry = entries[position]
            served = turn[2] + entry[3].cost
            yield entry
            position += position < len(entries) and entries[position] is entry
            if position < len(entries):
                heapq.heappush(later, (turn_of(entries[position], served), position))

    def _turn(self, tenant: int, line: Line[T]) -> None:
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
        require(not self._served.keys() & lines.keys(), "a tenant is in two positions")


def turn_of(entry: Entry[T], served: float) -> Turn:
    priority, _, number, waiting = entry
    return priority, waiting.cost > 0, served, number, waiting.tenant
