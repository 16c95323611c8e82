"""A rank's end of the socket to its engine: read by one thread that waits, written to by several."""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Any

import msgspec

from ..link.connection import LENGTH


class Channel:
    """The other end is a Connection."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._file = sock.makefile("rb")
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(list[incoming])
        self._received: deque[Any] = deque()
        self._writing = threading.Lock()

    def receive(self) -> Any:
        """Waits for the next message, without the interpreter's lock. Raises EOFError when there will be none."""
        while not self._received:
            (size,) = LENGTH.unpack(self._read(LENGTH.size))
            self._received.extend(self._decoder.decode(self._read(size)))
        return self._received.popleft()

    def send(self, message: Any) -> None:
        """Raises OSError when nobody is there to read it."""
        frame = msgspec.msgpack.encode([message])
        with self._writing:
            self._socket.sendall(LENGTH.pack(len(frame)) + frame)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data
