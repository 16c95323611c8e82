"""A timer for what somebody else has to do meanwhile."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

LATE = 0.1  # seconds: a loop that comes to a timer so late was held up itself
AGAIN = 0.05  # seconds in which it reads what has come meanwhile


class Timer:
    """loop.call_later, unless the loop was held up. When what one client has sent takes long, uvloop runs the timers
    that are due by then before it reads what others have sent meanwhile, and would close on them."""

    def __init__(self, loop: AbstractEventLoop, seconds: float, act: Callable[[], None]) -> None:
        self._loop, self._act, self._waits_again = loop, act, False
        self._start(seconds)

    def cancel(self) -> None:
        self._handle.cancel()

    def _start(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._handle = self._loop.call_later(seconds, self._is_over)

    def _is_over(self) -> None:
        if self._loop.time() - self._due > LATE and not self._waits_again:  # once: a loop may always be late
            self._waits_again = True
            self._start(AGAIN)
        else:
            self._act()
