"""Messages over a Unix socket: a frame is a length and a msgpack list, several messages a frame."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

LENGTH = struct.Struct("<I")


class Connection(asyncio.Protocol):
    """One end of the socket. Messages sent during one turn of the event loop leave in one frame."""

    def __init__(
        self, incoming: Any, on_message: Callable[[Any], None], on_lost: Callable[[Exception | None], None]
    ) -> None:
        """`incoming`: the union of message types that this end receives."""
        self._decoder = msgspec.msgpack.Decoder(list[incoming])
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._on_lost = on_lost
        self._received = bytearray()
        self._outbox: list[msgspec.Raw] = []
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_lost: Callable[[Exception | None], None],
    ) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(incoming, on_message, on_lost), sock=sock)
        return connection

    def send(self, message: Any) -> None:
        """Raises what encoding the message raises; the others of its frame leave all the same."""
        encoded = msgspec.Raw(self._encoder.encode(message))
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encoded)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if not messages or self._transport is None or self._transport.is_closing():
            return
        frame = self._encoder.encode(messages)
        self._transport.write(LENGTH.pack(len(frame)) + frame)

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received, start)
            end = start + LENGTH.size + size
            if len(self._received) < end:
                break
            for message in self._decoder.decode(memoryview(self._received)[start + LENGTH.size : end]):
                self._on_message(message)
            start = end
        if start:
            del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(exc)
