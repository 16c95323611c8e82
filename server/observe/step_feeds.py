"""What the engines do, for the pages that are open: each message is encoded once for all of them, and who has just come
gets the map of the blocks from here, without a word to the engine."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any

import msgspec

from ...engine.link.messages import BlockMap, StepReports
from ..client.client import Client
from ..errors import ApiError

MOST_PAGES = 64  # of one process: each takes some 50 µs of its loop ten times a second
MOST_OF_ONE = 16  # by the same key, or without a key from the same address
MAX_BEHIND = 20  # messages that a slow reader may be behind; beyond them it loses the oldest
LINGER = 10.0  # seconds after the last page until the engine is told: a page that comes again costs it nothing


class Watcher:
    """One open page."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._events: deque[bytes] = deque(maxlen=MAX_BEHIND)
        self._news = asyncio.Event()

    def put(self, event: bytes) -> None:
        self._events.append(event)
        self._news.set()

    async def next(self, seconds: float) -> bytes | None:
        """None: nothing has come within this time."""
        if not self._events:
            self._news.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return None
        return self._events.popleft()


class StepFeed:
    """Of one engine, which reports while this listens."""

    def __init__(self) -> None:
        self.watchers: set[Watcher] = set()
        self.leaving: asyncio.TimerHandle | None = None
        self._size = 0  # blocks in a cell of the map
        self._used: list[int] = []
        self._cached: list[int] = []
        self._map: bytes | None = None  # encoded, until it changes

    def greet(self, watcher: Watcher) -> None:
        """With all blocks, where they are known; else the engine has been asked for them."""
        if self._map is None and self._used:
            blocks = BlockMap(len(self._used), self._size, 0, self._used, self._cached)
            self._map = _encoded(StepReports([], blocks))
        if self._map is not None:
            watcher.put(self._map)

    def take(self, reports: StepReports) -> None:
        blocks = reports.blocks
        if len(self._used) != blocks.num_cells:
            self._used, self._cached = [0] * blocks.num_cells, [0] * blocks.num_cells
        end = blocks.start + len(blocks.used)
        self._used[blocks.start : end], self._cached[blocks.start : end] = blocks.used, blocks.cached
        self._size, self._map = blocks.blocks_per_cell, None
        if self.watchers:
            event = _encoded(reports)
            for watcher in self.watchers:
                watcher.put(event)


class StepFeeds:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._feeds: dict[Any, StepFeed] = {}  # by engine
        self._owners: Counter[str] = Counter()  # of open pages

    def open(self, engine: Any, owner: str) -> Watcher:
        """Of this one of the client's engines. Whoever opens one must close it. Raises ApiError where there are too
        many already."""
        if self._owners[owner] >= MOST_OF_ONE or self._owners.total() >= MOST_PAGES:
            whose = f"{self._owners[owner]} of yours, of {MOST_OF_ONE} that may"
            raise ApiError(
                429, f"There are {whose}, and {self._owners.total()} of all that look, of {MOST_PAGES}: close a page.",
                type="rate_limit_error", code="too_many_pages", headers={"retry-after": "10"},
            )  # fmt: skip
        self._owners[owner] += 1
        watcher = Watcher(owner)
        if (feed := self._feeds.get(engine)) is None:
            feed = self._feeds[engine] = StepFeed()
            engine.watch_steps(feed.take)
        if feed.leaving is not None:
            feed.leaving.cancel()
            feed.leaving = None
        feed.greet(watcher)
        feed.watchers.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        self._owners -= Counter((watcher.owner,))
        for engine, feed in self._feeds.items():
            if watcher in feed.watchers:
                feed.watchers.discard(watcher)
                if not feed.watchers:
                    feed.leaving = asyncio.get_running_loop().call_later(LINGER, self._leave, engine)

    def _leave(self, engine: Any) -> None:
        self._client.unwatch_steps(self._feeds.pop(engine).take)


def _encoded(reports: StepReports) -> bytes:
    return b"event: steps\ndata: " + msgspec.json.encode((reports.steps, reports.blocks)) + b"\n\n"
