"""Long work on the event loop, in turns: whatever one request asks for, the others are heard in between."""

from __future__ import annotations

import asyncio
import time

TURN = 2e-3  # seconds; many requests may have one between two looks at the sockets


class Pace:
    """Of one task. It has to `rest` after each small piece of work that no other wait follows."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN

    async def rest(self) -> None:
        """Lets the others go on, when the turn is over."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + TURN
