"""How large one body may be, and how much all of them together hold that have come and are not read yet.

That room is shared: when it is full, who holds most of it gives way to who holds less. No tenant may have all of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..client.board import BODIES, Board
from ..errors import ApiError
from ..lanes import TENANT
from .tenant import tenant_of

SMALL = 64 << 10  # bytes; such bodies are not counted: the number of connections bounds them
TOGETHER, AT_LEAST = 8, 256 << 20  # bodies of the largest size, bytes: what all may hold
SILENT = 5.0  # seconds after which an upload gives way to another one of its own tenant


class HeldBody:
    """What of one body has come and is not read yet."""

    def __init__(self, limit: BodyLimit, tenant: int = 0) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self.whole = False  # nothing more will come: it is being read, and stays
        self.latest = time.monotonic()  # that something came
        self._limit = limit
        self._refusal: ApiError | None = None
        self._reader: asyncio.Task[None] | None = None  # that waits for more of it

    def grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._limit.count(self, num_bytes)

    def release(self) -> None:
        """It was read, or nobody will read it. Idempotent."""
        self._limit.count(self, -self.num_bytes)
        self.num_bytes = 0

    async def following(self, receive: Receive) -> Message:
        """What comes next. Raises ApiError where it had to give way meanwhile."""
        reader = self._reader = asyncio.current_task()
        assert reader is not None
        try:
            message = await receive()
        except asyncio.CancelledError:
            if self._refusal is None or reader.uncancel():  # by somebody else, too
                raise
        finally:
            self._reader = None
        if self._refusal is not None:
            raise self._refusal
        self.whole = not message.get("more_body", False)
        self.latest = time.monotonic()
        return message

    def give_way(self, refusal: ApiError) -> None:
        self._refusal, self.whole = refusal, True
        self.release()
        if self._reader is not None:
            self._reader.cancel()


class BodyLimit:
    """Refuses a body that is too large: at once where its length is declared, else as soon as it has come so far."""

    def __init__(
        self, app: ASGIApp, limit: Callable[[], int], rejected: Callable[[str], None], board: Board | None = None,
        larger: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """`limit`: bytes of a body; asked for each request, since it may follow the engine's context. `rejected`
        counts those for whom there is no room. `board`: of several API processes, which share the room; each judges
        of the uploads that are its own. `larger`: limits of paths that may bring more."""
        self.app = app
        self._rejected = rejected
        self.limit = limit
        self._larger = larger or {}
        self.num_bytes = 0  # of all bodies that are held
        self._held: dict[HeldBody, None] = {}
        self._by_tenant: Counter[int] = Counter()  # bytes; those who hold none have no entry
        self._board = board

    def count(self, body: HeldBody, num_bytes: int) -> None:
        if not num_bytes:
            return
        self.num_bytes += num_bytes
        self._by_tenant[body.tenant] += num_bytes
        if not self._by_tenant[body.tenant]:
            del self._by_tenant[body.tenant]
        if num_bytes > 0:
            self._held[body] = None
        else:
            self._held.pop(body, None)
        if self._board is not None:
            self._board.set(BODIES, self.num_bytes)

    def _in_all(self) -> int:
        return self.num_bytes + (0 if self._board is None else self._board.others(BODIES))

    def _make_room(self, body: HeldBody, most: int) -> None:
        """For what has just come of this one. Raises ApiError where nobody has to give way to it."""
        share = most - most // TOGETHER  # the most of one tenant
        while (own := self._by_tenant[body.tenant]) > share or self._in_all() > most:
            other = None if own > share else self._slowest_of_others(body)
            if other is None:
                other = self._silent(body)
            self._rejected("bodies")
            if other is None:
                raise _no_room(most, own)
            other.give_way(_no_room(most, self._by_tenant[other.tenant]))

    def _slowest_of_others(self, body: HeldBody) -> HeldBody | None:
        """Of the tenant that holds most of all that upload: of which nothing has come for longest."""
        uploads = [held for held in self._held if not held.whole]
        tenant = max((held.tenant for held in uploads), key=self._by_tenant.__getitem__, default=body.tenant)
        if self._by_tenant[tenant] <= self._by_tenant[body.tenant]:
            return None
        return min((held for held in uploads if held.tenant == tenant), key=lambda held: held.latest)

    def _silent(self, body: HeldBody) -> HeldBody | None:
        """Of the same tenant, one of which nothing has come for long."""
        uploads = (held for held in self._held if held.tenant == body.tenant and not held.whole and held is not body)
        slowest = min(uploads, key=lambda held: held.latest, default=None)
        return slowest if slowest is not None and slowest.latest <= time.monotonic() - SILENT else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        tenant = tenant_of(scope)
        TENANT.set(tenant)  # each request has a task of its own
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        limit, option = self.limit(), "--max-body-size"
        if self._larger.get(path := get_route_path(scope), 0) > limit:
            limit, option = self._larger[path], "--max-file-size"
        if length is not None and int(length) > limit:
            await _too_large(limit, option).response(scope)(scope, receive, send)
            return
        if length is not None and int(length) <= SMALL:
            await self.app(scope, receive, send)
            return
        most, received = max(TOGETHER * limit, AT_LEAST), 0
        held = scope.setdefault("state", {})["held_body"] = HeldBody(self, tenant)

        async def count() -> Message:
            nonlocal received
            message = await held.following(receive)
            if body := message.get("body"):
                received += len(body)
                if received > limit:
                    raise _too_large(limit, option)
                held.grow(len(body))
                self._make_room(held, most)
            return message

        try:
            await self.app(scope, count, send)
        except ApiError as error:  # of `count`, where somebody read who answers no errors
            await error.response(scope)(scope, receive, send)
        finally:
            held.release()


def _too_large(limit: int, option: str) -> ApiError:
    message = f"The request's body exceeds {limit} bytes; send less, or raise {option}."
    return ApiError(413, message, code="body_too_large")


def _no_room(most: int, own: int) -> ApiError:
    """`own`: bytes that the tenant holds. The connection ends with it: the rest of the body may never come."""
    return ApiError(
        429,
        f"The room for bodies is used up: all together may have {most} bytes on their way, one key or address "
        f"may have {most - most // TOGETHER}, and this one has {own}; send fewer at a time, and try again in 1 s.",
        type="rate_limit_error",
        code="too_many_bodies",
        headers={"retry-after": "1", "connection": "close"},
    )
