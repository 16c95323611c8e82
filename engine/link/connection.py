"""Messages over a Unix socket: a frame is a length and a msgpack list, of several messages where they are small."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

LENGTH = struct.Struct("<Q")
ALONE = b"\x91"  # how msgpack begins a list of one
MAX_FRAME = 1 << 20  # bytes, where it has several messages: the other end has to have all of it before it reads any


class Connection(asyncio.Protocol):
    """One end of the socket. Messages sent during one turn of the event loop leave together."""

    def __init__(
        self, incoming: Any, on_message: Callable[[Any], None], on_lost: Callable[[Exception | None], None]
    ) -> None:
        """`incoming`: the union of message types that this end receives."""
        self._decoder = msgspec.msgpack.Decoder(list[incoming])
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._on_lost = on_lost
        self._received = bytearray()
        self._outbox: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket
        self._gone = asyncio.Event()
        self._is_over = False  # see finish
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
        connection._socket = sock
        return connection

    def send(self, message: Any) -> None:
        """Raises what encoding the message raises; the others of its frame leave all the same."""
        if self._is_over:
            return
        encoded = self._encoder.encode(message)
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encoded)

    def send_now(self, encoded: bytes) -> None:
        """A message, encoded, in a frame of its own, which is on its way when this returns if the socket takes it.
        Transports may wait for the end of the turn, in which there is still work to do."""
        self._flush()
        transport = self._transport
        if self._is_over or transport is None or transport.is_closing():
            return
        frame = self._encoder.encode([msgspec.Raw(encoded)])
        data, sent = LENGTH.pack(len(frame)) + frame, 0
        if not transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # it is full, or nobody is there, as on_lost will tell
                sent = self._socket.send(data)
        if sent < len(data):
            transport.write(data[sent:])

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if not messages or self._transport is None or self._transport.is_closing():
            return
        start = size = 0
        for end, message in enumerate(messages):
            if end > start and size + len(message) > MAX_FRAME:
                self._write(self._transport, messages[start:end])
                start, size = end, 0
            size += len(message)
        self._write(self._transport, messages[start:])

    def _write(self, transport: asyncio.Transport, messages: list[bytes]) -> None:
        if len(messages) == 1 and len(messages[0]) > MAX_FRAME:  # pictures: a copy takes as long as some steps
            transport.write(LENGTH.pack(len(ALONE) + len(messages[0])) + ALONE)
            transport.write(messages[0])
            return
        frame = self._encoder.encode(list(map(msgspec.Raw, messages)))
        transport.write(LENGTH.pack(len(frame)) + frame)

    @property
    def unread(self) -> int:
        """Bytes that wait here until the other end reads."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Closes it, and forgets what the other end has not read."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    async def finish(self, seconds: float) -> None:
        """Sends nothing more, and returns when the other end has read all and closed, after `seconds` at the latest.

        Neither `on_message` nor `on_lost` is called, but what comes is read until then: whoever writes to a socket
        that is closed hears that at once, and loses what it has not read.
        """
        self._on_message, self._on_lost = lambda _: None, lambda _: None
        self._flush()
        self._is_over = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), seconds)

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
        self._gone.set()
        self._on_lost(exc)


OWNER = "owner"  # a file with the number of the process: without it a folder is nobody's business


class PrivateFolder:
    """Its maker holds a lock on it, which the system lets go of however that process ends. Processes that it starts do
    not inherit the lock."""

    def __init__(self, kind: str) -> None:
        """`kind`: part of its name: /tmp/vserve-KIND-…"""
        prefix = f"vserve-{kind}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_left(left)
        self.path = tempfile.mkdtemp(prefix=prefix)
        self._lock = _open(self.path)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:  # NFS locks no folders, others nothing at all: only what is left behind stays there
            return
        Path(self.path, OWNER).write_text(f"{os.getpid()}\n")  # only now: without a lock it would look left behind

    def close(self) -> None:
        """Removes it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _open(path: str | Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_left(path: Path) -> None:
    """Unless somebody holds it, or it is another user's."""
    try:
        lock = _open(path)
    except OSError:
        return
    try:
        if os.fstat(lock).st_uid == os.geteuid() and (path / OWNER).is_file():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:  # it is held
        pass
    finally:
        os.close(lock)
