"""Whose grammar is compiled next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from vserve.server.grammar.constraint import Compile, Constraint
from vserve.server.grammar.queue import LONG, NUM_CHILDREN, OVERDUE, CompileQueue, Job


class Queue:
    """Jobs by name."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queue = CompileQueue()
        self.names: dict[int, str] = {}  # by id
        self.running: list[Job] = []

    def add(self, *owners: str, size: int = 1, since: float = 0.0) -> None:
        for owner in owners:
            message = Compile(len(self.names), Constraint("regex", "x" * size), 1.0)
            job = Job(message, owner, self.loop.create_future())
            job.since += since
            self.names[job.message.id] = f"{owner}{size}"
            self.queue.add(job)

    def take(self) -> str | None:
        if (job := self.queue.take(self.running)) is None:
            return None
        self.running.append(job)
        return self.names[job.message.id]

    def order(self) -> list[str]:
        """Of all that waits, each of which ends before the next begins."""
        names = []
        while (name := self.take()) is not None:
            names.append(name)
            self.running.clear()
        return names


@pytest.fixture
def queue() -> Iterator[Queue]:
    loop = asyncio.new_event_loop()
    yield Queue(loop)
    loop.close()


def test_owners_take_turns(queue: Queue) -> None:
    queue.add("a", "a", "a", "a", "b", "c")
    queue.add("b", size=2)
    assert queue.order() == ["a1", "b1", "c1", "a1", "b2", "a1", "a1"]


def test_who_has_the_fewest_running_comes_first(queue: Queue) -> None:
    queue.add("a", "a")
    assert queue.take() == "a1"
    queue.add("b", "b")
    assert [queue.take(), queue.take(), queue.take()] == ["b1", "a1", "b1"]


def test_short_before_long(queue: Queue) -> None:
    queue.add("a", size=30)
    queue.add("a", size=10)
    queue.add("a", size=20)
    queue.add("a", size=40, since=-2 * OVERDUE)  # has given way for long enough
    assert queue.order() == ["a40", "a10", "a20", "a30"]


def test_long_ones_leave_a_child_to_others(queue: Queue) -> None:
    queue.add("a", "b", "c", size=LONG)
    taken = [queue.take() for _ in range(NUM_CHILDREN)]
    assert taken == [f"a{LONG}", *[None] * (NUM_CHILDREN - 1)] and len(queue.queue) == 2
    queue.add("a")
    assert queue.take() == "a1"


def test_who_has_the_most_gives_way_as_long_as_it_has_more(queue: Queue) -> None:
    assert queue.queue.greediest("a") is None
    queue.add("a", "a", "b")
    queue.add("a", size=9)
    job = queue.queue.greediest("b")
    assert job is not None and queue.names[job.message.id] == "a9"
    assert queue.queue.greediest("a") is None
    queue.queue.remove(job)
    assert queue.queue.greediest("b") is None, "both would have two"
    assert queue.queue.greediest("c") is not None
