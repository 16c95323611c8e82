"""A stream that is kept as well: its answer is put together while its events go out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import ApiError
from ..generation.answer import Answer, Collected
from ..generation.choice import Choice, Delta
from .events import Events


class Recorded:
    """The events of `events`; `keep` gets the answers once all of them are whole."""

    def __init__(self, events: Events, choices: Sequence[Choice], keep: Callable[[list[Answer]], None]) -> None:
        self._events = events
        self._collected = Collected(choices)
        self._keep = keep

    def openings(self) -> Iterable[bytes]:
        return self._events.openings()

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        self._collected.add(choice, delta)
        return self._events.delta(choice, delta)

    def closing(self) -> bytes:
        self._keep(self._collected.answers())
        return self._events.closing()

    def failure(self, error: ApiError) -> bytes:
        return self._events.failure(error)
