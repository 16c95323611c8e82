"""The events of a response that runs, or ran, without its client, for whoever comes to read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

AT_ONCE = 256  # events of one write
_END = b"\n\n"


class EventLog:
    """Each event's place is its sequence number."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.num_bytes = 0
        self._ended = False
        self._news = asyncio.Event()

    def add(self, data: bytes) -> None:
        """One or more whole events."""
        self.events += (event + _END for event in data.split(_END)[:-1])
        self.num_bytes += len(data)
        self._tell()

    def end(self) -> None:
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """What there is from event `start` on, then what comes, until the end."""
        while True:
            if start < len(self.events):
                some = self.events[start : start + AT_ONCE]
                start += len(some)
                yield b"".join(some)
            elif self._ended:
                return
            else:
                await self._news.wait()
