"""Requests and their answers as uvicorn runs them, and what it does not know: clients that have closed their side, and
answers that a connection ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Cycle(RequestResponseCycle):
    """`left`: the client has closed its side, which looks the same whether it still reads or not. What needs no
    computing is answered; the rest hears that the client has left."""

    left = False

    async def receive(self) -> Any:
        if not self.left or (self.message_event.is_set() and not self.response_complete):  # the request itself
            return await super().receive()
        if self.response_started and not self.response_complete:  # a stream ends here
            self.disconnected = True
            self.transport.close()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """uvicorn's; a piece of a stream, of which there is one a token, need not pass all that it asks."""
        plain = self.chunked_encoding and not (self.flow.write_paused or self.disconnected or self.response_complete)
        if plain and (body := message.get("body")) and message.get("more_body"):
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        else:
            await super().send(message)


# uvicorn makes them by this name. Another class given to one later would slow down each of its sends by half.
httptools_impl.RequestResponseCycle = Cycle  # type: ignore[misc]


class LastCycle(Cycle):
    """The connection ends with it: one `connection` header, whatever the application says; no chunks for HTTP/1.0,
    which does not know them: the end of the connection is that of the answer."""

    _until_close = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
            message = {**message, "headers": headers}
            measured = any(name.lower() == b"content-length" for name, _ in headers)
            if self.scope["http_version"] == "1.0" and not measured:
                self._until_close, self.chunked_encoding = True, False
        elif self._until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Ending:
    """The transport as a cycle sees it: how it is closed is for its protocol to say."""

    __slots__ = ("_close", "is_closing", "write")

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self.write, self.is_closing = transport.write, transport.is_closing
        self._close = WeakMethod(close)  # the protocol holds its cycle

    def close(self) -> None:
        if (close := self._close()) is not None:
            close()
