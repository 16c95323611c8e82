"""What this process does as one of several API processes: its desk and its heart and, where it is the first one, the
others."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import msgspec
from fastapi import FastAPI

from ..engine.options.config import EngineConfig
from .api_processes import ApiProcesses
from .client.board import SERVES
from .client.hearts import beat, watch_first
from .client.mailbox import EngineDeadError
from .client.meeting import Meeting
from .colleagues import ColleagueError
from .desk import Desk
from .generation.adapters import Record
from .http.front_door import FrontDoor
from .options.config import ServerConfig
from .state import ServerState


class Team:
    def __init__(
        self, meeting: Meeting, front: FrontDoor, engine: Callable[[], EngineConfig], config: ServerConfig,
        sources: dict[str, str], sock: socket.socket, give_up: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`front`: what answers requests that others pass on; the rest as ApiProcesses has it."""
        self._meeting = meeting
        self._stall_timeout = config.stall_timeout
        self._give_up = give_up
        self._engine = engine
        self._desk = Desk(meeting, front)
        self._others: ApiProcesses | None = None
        if meeting.is_first:
            self._others = ApiProcesses(meeting, engine, config, sources, sock.fileno(), give_up)
        self._hearts: list[asyncio.Task[None]] = []  # to the very end
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """As soon as the event loop turns."""
        self._hearts.append(asyncio.create_task(beat(self._meeting.board)))
        if self._others is None:
            self._hearts.append(asyncio.create_task(watch_first(self._meeting.board, self._stall_timeout)))
        else:
            self._others.start()

    async def meet(self, app: FastAPI) -> None:
        """From now on this process can be asked by the others; the first one waits until all serve."""
        self._desk.open(app.state.server)
        self._tasks.append(asyncio.create_task(self._desk.serve()))
        if self._others is None and self._engine().enable_lora:
            try:
                await self._join(app.state.server)
            except ColleagueError as error:
                self._give_up(str(error))
                return
        self._meeting.board.set(SERVES, 1)  # nothing is missing here that a request may ask for
        if self._others is not None:
            try:
                await self._others.ready()
            except EngineDeadError as error:
                self._give_up(str(error))
            self._tasks.append(asyncio.create_task(self._others.watch()))

    async def _join(self, server: ServerState) -> None:
        """Takes over the adapters that the first process has had loaded. Raises ColleagueError."""
        assert server.colleagues is not None
        known = await server.colleagues.ask_first("/own/adapters")
        server.adapters.join(msgspec.msgpack.decode(known, type=list[Record]))

    def end(self, number: signal.Signals) -> None:
        """Passes on what this process has been told."""
        if self._others is not None:
            self._others.end(number)

    def kill(self) -> None:
        """At once; for whoever leaves at once, too."""
        if self._others is not None:
            self._others.kill()
            self._meeting.close()

    async def close(self) -> None:
        """Returns when there are no others."""
        for task in self._tasks:
            task.cancel()
        if self._others is not None:
            await self._others.close()
