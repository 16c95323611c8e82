"""Where several API processes and the engines meet: a private folder of sockets, and who sits where."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...engine.link.clients import SHIFT
from ...engine.link.connection import Connection, PrivateFolder
from ...engine.link.messages import FromEngine, Hello
from ...engine.options.config import EngineConfig

if TYPE_CHECKING:
    from .board import Board

FIRST = 0  # the seat of the process that the others and the engines were started by


@dataclass
class Meeting:
    folder: str
    seat: int
    client: int  # its number for engines: another one for each process, as many as there may be of one seat
    board: Board
    secret: str = field(repr=False)  # of its processes: what is asked without it is not asked by one of them
    _own_folder: PrivateFolder | None = None
    _listeners: dict[int, socket.socket] = field(default_factory=dict)  # of engines

    @classmethod
    def open(cls, num_seats: int) -> Meeting:
        """By the first process, which closes it."""
        from .board import Board  # with numpy, for which one process alone does not wait

        folder = PrivateFolder("api")
        return cls(folder.path, FIRST, FIRST, Board(None, num_seats, FIRST), secrets.token_hex(32), folder)

    @property
    def is_first(self) -> bool:
        return self.seat == FIRST

    @property
    def first_id(self) -> int:
        """Of this process's requests."""
        return self.client << SHIFT

    def engine_path(self, index: int) -> str:
        return os.path.join(self.folder, f"engine-{index}.sock")

    def api_path(self, seat: int) -> str:
        return os.path.join(self.folder, f"api-{seat}.sock")

    def listener(self, index: int) -> socket.socket:
        """On which this engine and its successors are reached: who comes while there is none, waits for the next."""
        if index not in self._listeners:
            self._listeners[index] = listen(self.engine_path(index))
        return self._listeners[index]

    def close(self) -> None:
        assert self._own_folder is not None, "its maker closes it"
        self._own_folder.close()


def listen(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(path):  # of a process that is gone
        os.unlink(path)
    sock.bind(path)
    sock.listen(64)
    sock.setblocking(False)
    return sock


class EngineLink:
    """An engine that another process has started, with the face of EngineProcess."""

    def __init__(
        self, path: str, client: int, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> None:
        self._path, self._client = path, client
        self._on_message, self._on_lost = on_message, on_lost
        self._connection: Connection | None = None
        self._ending = False
        self.send: Callable[[Any], None]

    async def start(self, config: EngineConfig, variables: Mapping[str, str] = {}) -> None:
        """Returns when the engine, or its place, was reached. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self._path)
        except OSError:
            sock.close()
            raise
        self._connection = await Connection.open(sock, FromEngine, self._on_message, self._lost)
        self.send = self._connection.send
        self.send(Hello(self._client))

    def _lost(self, error: Exception | None) -> None:
        if not self._ending:
            self._on_lost("the engine process is gone")

    def is_stopped(self) -> bool:
        return False  # as far as this process knows: it is another one's child

    is_suspended = is_stopped

    def dump_stacks(self) -> None:
        """The process does that that has started it."""

    def kill(self) -> None:
        pass

    async def end(self, seconds: float = 0.0) -> None:
        self._ending = True
        if self._connection is not None:
            self._connection.close()
