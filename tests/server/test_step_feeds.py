"""Pages that look at an engine: what many of them cost the loop and the engine, and how many there may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from vserve.engine.link.messages import BlockMap, StepRecord, StepReport, StepReports
from vserve.server.errors import ApiError
from vserve.server.observe import step_feeds
from vserve.server.observe.step_feeds import MOST_OF_ONE, MOST_PAGES, StepFeeds, Watcher


class Engine:
    """Who listens to it, and how often it has been asked for all of its blocks."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[StepReports], None]] = []
        self.num_asked = 0

    def watch_steps(self, listener: Callable[[StepReports], None]) -> None:
        self.listeners.append(listener)
        self.num_asked += 1

    def unwatch_steps(self, listener: Callable[[StepReports], None]) -> None:
        self.listeners.remove(listener)

    def say(self, start: int, used: list[int], steps: int = 0) -> None:
        reports = [StepReport(StepRecord(number, 0.0, 1, 1, 1), []) for number in range(steps)]
        for listener in self.listeners:
            listener(StepReports(reports, BlockMap(6, 2, start, used, [0] * len(used))))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[StepReports]:
    """All messages that were encoded."""
    found: list[StepReports] = []
    real = step_feeds._encoded

    def encode(reports: StepReports) -> bytes:
        found.append(reports)
        return real(reports)

    monkeypatch.setattr(step_feeds, "_encoded", encode)
    return found


async def blocks_of(watcher: Watcher) -> tuple[list[Any], bytes]:
    """[cells, blocks in each, the first one, used, cached] of the next message, and the message."""
    event = await watcher.next(1.0)
    assert event is not None
    return msgspec.json.decode(event.partition(b"data: ")[2])[1], event


def test_a_message_is_encoded_once_and_who_comes_costs_the_engine_nothing(encoded: list[StepReports]) -> None:
    async def main() -> None:
        engine: Any = Engine()
        feeds = StepFeeds(engine)
        first = feeds.open(engine, "0")
        engine.say(0, [1, 2, 3, 4, 5, 6])
        assert (await blocks_of(first))[0] == [6, 2, 0, [1, 2, 3, 4, 5, 6], [0] * 6]
        engine.say(2, [7, 7], steps=1)
        await blocks_of(first)
        encoded.clear()
        others = [feeds.open(engine, str(1 + number % 3)) for number in range(40)]
        assert engine.num_asked == 1 and len(encoded) == 1 and await first.next(0.01) is None
        whole = [await blocks_of(watcher) for watcher in others]
        assert all(blocks == [6, 2, 0, [1, 2, 7, 7, 5, 6], [0] * 6] for blocks, _ in whole)
        encoded.clear()
        engine.say(4, [0, 0], steps=2)
        heard = [(await blocks_of(watcher))[1] for watcher in (first, *others)]
        assert len(encoded) == 1 and all(event is heard[0] for event in heard)

    asyncio.run(main())


def test_a_page_that_comes_again_and_again_is_one_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine: Any = Engine()
        feeds = StepFeeds(engine)
        for _ in range(100):
            feeds.close(feeds.open(engine, ""))
        assert engine.num_asked == 1 and len(engine.listeners) == 1
        monkeypatch.setattr(step_feeds, "LINGER", 0.0)
        feeds.close(feeds.open(engine, ""))
        await asyncio.sleep(0.05)
        assert not engine.listeners, "nobody looks"
        feeds.open(engine, "")
        assert engine.num_asked == 2

    asyncio.run(main())


def test_each_of_several_engines_is_looked_at_by_itself() -> None:
    async def main() -> None:
        engines: Any = [Engine(), Engine()]
        feeds = StepFeeds(engines[0])
        watchers = [feeds.open(engine, "") for engine in engines]
        engines[1].say(0, [1] * 6)
        assert (await blocks_of(watchers[1]))[0][3] == [1] * 6 and await watchers[0].next(0.01) is None

    asyncio.run(main())


def test_pages_of_one_and_of_all_are_counted() -> None:
    async def main() -> None:
        engine: Any = Engine()
        feeds = StepFeeds(engine)
        opened = []
        for owner in "abcd":
            opened += [feeds.open(engine, owner) for _ in range(MOST_OF_ONE)]
            if owner != "d":
                with pytest.raises(ApiError, match=f"{MOST_OF_ONE} of yours, of {MOST_OF_ONE} that may") as error:
                    feeds.open(engine, owner)
                assert error.value.status == 429 and error.value.code == "too_many_pages"
        assert len(opened) == MOST_PAGES
        with pytest.raises(ApiError, match=f"0 of yours, .* and {MOST_PAGES} of all that look, of {MOST_PAGES}"):
            feeds.open(engine, "e")
        feeds.close(opened.pop())
        opened.append(feeds.open(engine, "e"))
        for watcher in opened:
            feeds.close(watcher)
        assert not feeds._owners

    asyncio.run(main())


def test_row_31_300_pages_at_once(serve: Any, engine: Any) -> None:
    """Over sockets: of one address, most are told that they are too many, and those that leave make room."""
    watched = Engine()
    engine.watch_steps, engine.unwatch_steps = watched.watch_steps, watched.unwatch_steps

    async def test(port: int) -> None:
        async def open_page() -> tuple[int, bytes, asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ui/events HTTP/1.1\r\nhost: x\r\n\r\n")
            status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
            return status, await reader.read(1000), reader, writer

        pages = await asyncio.gather(*(open_page() for _ in range(300)))
        statuses = [page[0] for page in pages]
        assert (statuses.count(200), statuses.count(429)) == (MOST_OF_ONE, 300 - MOST_OF_ONE)
        assert watched.num_asked == 1 and all(b"event: hello" in body for status, body, *_ in pages if status == 200)
        for *_, writer in pages:
            writer.close()
        status = 429
        while status == 429:  # until the server has seen it
            status, _, _, writer = await open_page()
            writer.close()
            await asyncio.sleep(0.05)
        assert status == 200

    serve(test)
