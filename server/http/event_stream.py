"""A response of server-sent events that are bytes already."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

# Streams end by themselves when the server drains; the library would cut them off at the first SIGTERM.
AppStatus.disable_automatic_graceful_drain()


class EventStream(EventSourceResponse):
    """A stream of encoded events. However it ends, `on_close` is called."""

    def __init__(
        self, content: AsyncIterator[bytes], on_close: Callable[[], None], headers: Mapping[str, str], ping: float
    ) -> None:
        super().__init__(content, headers={"cache-control": "no-cache", **headers}, sep="\n", ping=ping)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def plain(data: bytes) -> Awaitable[None]:
            return send({"type": "http.response.body", "body": data, "more_body": True})

        self._send_event: Callable[[Any], Awaitable[None]] = scope.get("state", {}).get("send_event", plain)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def _stream_response(self, send: Send) -> None:
        """As in the library, without the cancel scope that it opens for every event: no send has a time limit here."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send_event = self._send_event
        async for data in self.body_iterator:
            await send_event(data)
        async with self._send_lock:  # a ping must not follow
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
