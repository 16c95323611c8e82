"""How large one body may be, and how much all of them together hold that have come and are not read yet."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..client.board import BODIES, Board
from ..errors import ApiError

SMALL = 64 << 10  # bytes; such bodies are not counted: the number of connections bounds them
TOGETHER, AT_LEAST = 8, 256 << 20  # bodies of the largest size, bytes: what all may hold


class HeldBody:
    """What of one body has come and is not read yet."""

    def __init__(self, limit: BodyLimit) -> None:
        self._limit = limit
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._limit.count(num_bytes)

    def release(self) -> None:
        """It was read, or nobody will read it. Idempotent."""
        self._limit.count(-self._num_bytes)
        self._num_bytes = 0


class BodyLimit:
    """Refuses a body that is too large: at once where its length is declared, else as soon as it has come so far."""

    def __init__(
        self, app: ASGIApp, limit: Callable[[], int], rejected: Callable[[str], None], board: Board | None = None
    ) -> None:
        """`limit`: bytes of a body; asked for each request, since it may follow the engine's context. `rejected`
        counts those for whom there is no room. `board`: of several API processes, which share the room."""
        self.app = app
        self._rejected = rejected
        self.limit = limit
        self.num_bytes = 0  # of all bodies that are held
        self._board = board

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._board is not None and num_bytes:
            self._board.set(BODIES, self.num_bytes)

    def _in_all(self) -> int:
        return self.num_bytes + (0 if self._board is None else self._board.others(BODIES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        limit = self.limit()
        if length is not None and int(length) > limit:
            await _too_large(limit).response(scope)(scope, receive, send)
            return
        if length is not None and int(length) <= SMALL:
            await self.app(scope, receive, send)
            return
        most, received = max(TOGETHER * limit, AT_LEAST), 0
        held = scope.setdefault("state", {})["held_body"] = HeldBody(self)

        async def count() -> Message:
            nonlocal received
            message = await receive()
            if body := message.get("body"):
                received += len(body)
                if received > limit:
                    raise _too_large(limit)
                held.grow(len(body))
                if self._in_all() > most:
                    self._rejected("bodies")
                    raise _too_many(most)
            return message

        try:
            await self.app(scope, count, send)
        finally:
            held.release()


def _too_large(limit: int) -> ApiError:
    message = f"The request's body exceeds {limit} bytes; send less, or raise --max-body-size."
    return ApiError(413, message, code="body_too_large")


def _too_many(most: int) -> ApiError:
    message = f"Bodies of more than {most} bytes in all are on their way; try again in 1 s."
    return ApiError(429, message, type="rate_limit_error", code="too_many_bodies", headers={"retry-after": "1"})
