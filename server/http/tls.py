"""HTTPS: a connection takes part in limits from its first packet on, and not only once hands have been shaken."""

from __future__ import annotations

import asyncio
import ssl
from asyncio import BaseTransport, Transport
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .protocol import HttpProtocol
from .refusal import Refusal


class TlsProtocol(HttpProtocol):
    """The listener knows nothing of TLS. Until hands have been shaken, `transport` is the plain one, and this is a
    newcomer that has said nothing, with the time for its head; then it is the one that encrypts."""

    tls: ssl.SSLContext

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_open = False  # hands have been shaken
        self._is_lost = False
        self._early = bytearray()  # of the request, which came with the last words of the handshake
        self._plain: Transport
        self._handshake: asyncio.Task[None] | None = None  # from the client's first word on: silence costs nothing

    # ---- the handshake ----

    def connection_made(self, transport: BaseTransport) -> None:
        self._plain = cast(Transport, transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_open:
            super().data_received(data)
        elif self._handshake is not None:
            self._early += data
        else:
            self._plain.pause_reading()
            self._handshake = self.loop.create_task(self._shake_hands(data))

    async def _shake_hands(self, hello: bytes) -> None:
        """Of what goes wrong only the connection hears. Its clock, and who needs its place, close the plain transport,
        which ends this."""
        starting = self.loop.create_task(self.loop.start_tls(
            self._plain, self, self.tls, server_side=True,
            ssl_handshake_timeout=2 * self.limits.header_timeout + 1,  # the clock here is kinder, and comes before
            ssl_shutdown_timeout=self.limits.write_timeout,
        ))  # fmt: skip
        await asyncio.sleep(0)
        if not starting.done():  # what decrypts is told of the transport next, and then gets its first word
            self.loop.call_soon(_feed, self._plain.get_protocol(), hello)
        try:
            transport = await starting
        except (OSError, RuntimeError):  # uvloop raises RuntimeError for a transport that was closed meanwhile
            transport = None
        if transport is None or transport.is_closing():
            self.connection_lost(None)
            return
        self._is_open = True
        HttpToolsProtocol.connection_made(self, transport)  # it has been counted
        if self._refusal is not None:
            self._say(self._refusal)
            return
        self._expect(self.limits.header_timeout)
        if self._early:
            self.data_received(bytes(self._early))
            self._early.clear()

    def _say(self, refusal: Refusal) -> None:
        if not self._is_open:  # who is refused for want of room can read it only then
            self._refusal = refusal
            self.lingering[self] = None
            self.newcomers.pop(self, None)
            self._expect(self.limits.header_timeout)
        else:
            super()._say(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_lost:  # of a handshake that has failed asyncio may tell once more
            self._is_lost = True
            super().connection_lost(exc)

    def _end(self) -> None:
        """TLS waits for the client to say goodbye too; whoever needs the place does not."""
        super()._end()
        unread = self.transport.get_write_buffer_size() or self._plain.get_write_buffer_size()
        if self._is_open and not self._is_lost and not unread:
            self.lingering[self] = None


def _feed(protocol: Any, data: bytes) -> None:
    """As a transport would."""
    while data:
        buffer = protocol.get_buffer(len(data))
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]
