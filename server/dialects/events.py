"""Bytes on the wire of a stream, whatever API it is of."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol, TypeVar

from ..client.mailbox import EngineDeadError
from ..errors import ApiError, internal_error, unavailable
from ..generation.answer import Answer
from ..generation.choice import Choice, Delta
from ..generation.generation import Generation
from ..pace import Pace

logger = logging.getLogger(__name__)

MAX_OPENING = 1 << 16  # bytes; thousands of choices may each repeat a long prompt


class Events(Protocol):
    """What the events of a stream are made by, whatever API it is of."""

    def openings(self) -> Iterable[bytes]:
        """Before the first text, piece by piece."""
        ...

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one engine output, often none or one."""
        ...

    def closing(self) -> bytes:
        """After the last choice has finished."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Instead of whatever would still have come."""
        ...


async def stream(
    generation: Generation,
    events: Events,
    first: tuple[Choice, Delta] | None,
    deltas: AsyncIterator[tuple[Choice, Delta]],
    request_id: str,
) -> AsyncIterator[bytes]:
    """The whole stream. An error in one choice ends all of them: after the status line it can only be an event. Without
    a `first` delta it begins before the engine has said anything.
    """
    try:
        pace, data = Pace(), b""
        for opening in events.openings():
            if len(data) > MAX_OPENING:
                yield data
                data = b""
                await pace.rest()
            data += opening
        yield data if first is None else data + events.delta(*first)
        async for choice, delta in deltas:
            if data := events.delta(choice, delta):
                yield data
        yield events.closing()
    except Exception as error:
        if isinstance(error, ApiError):
            answer = error
        elif isinstance(error, EngineDeadError):
            answer = unavailable(error)
        else:
            logger.exception("request %s failed", request_id)
            answer = internal_error(request_id)
        generation.failure = answer
        generation.close()
        yield events.failure(answer)
    finally:
        generation.close()


Told = TypeVar("Told", bound=Events)


def told(events: Told, answers: Sequence[Answer]) -> Told:
    """The events of an answer that is not streamed, after they have added it up; it has one choice."""
    (answer,) = answers
    events.delta(answer.choice, answer.delta)
    events.closing()
    return events
