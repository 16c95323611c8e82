"""The API processes beside the first one: started by it, started again when they die or hang, and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..engine.link import logs
from ..engine.options.config import EngineConfig
from .client.board import SERVES
from .client.engine_client import RESTART_WINDOW
from .client.hearts import PATIENCE, START_PATIENCE, Pulse
from .client.mailbox import EngineDeadError
from .client.meeting import Meeting
from .options.config import ServerConfig

logger = logging.getLogger("vserve")

LOOK_UP = 0.05  # seconds between two looks at processes that start or end
RETRY = 1.0  # seconds after a start that failed
LAST_WORDS = 0.2  # seconds for the stacks of one that hangs
LAST_SECONDS = 5.0  # beside --shutdown-timeout, until a process that does not end is killed


class ApiProcesses:
    def __init__(
        self, meeting: Meeting, engine: Callable[[], EngineConfig], config: ServerConfig, sources: dict[str, str],
        descriptor: int, give_up: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`engine`: the options as they are now; `descriptor`: of the socket that all listen on; `give_up` hears why
        the server cannot go on."""
        self._meeting, self._engine, self._config, self._sources = meeting, engine, config, sources
        self._descriptor = descriptor
        self._give_up = give_up
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by seat
        self._failed: dict[int, str] = {}  # why there is none, by seat
        self._pulses: dict[int, Pulse] = {}  # by seat
        self._hung: set[int] = set()  # seats whose process served, and was killed since it was silent
        self._next_client = 1
        self._deaths: deque[float] = deque()
        self._ending = False

    @property
    def seats(self) -> range:
        return range(1, self._meeting.board.num_seats)

    def start(self) -> None:
        """They load what they need while the engines do, and wait for these."""
        for index in range(self._engine().data_parallel_size):
            self._meeting.listener(index)
        for seat in self.seats:
            self._start_one(seat)

    async def ready(self) -> None:
        """Returns when all of them serve. Raises EngineDeadError when one cannot."""
        for seat in self.seats:
            while not self._meeting.board.get(seat, SERVES):
                if self._ending:
                    return
                await self._end_if_it_hangs(seat)
                if (how := self._end_of(seat)) is not None:
                    raise EngineDeadError(f"API process {seat} {how}; its last words are above")
                await asyncio.sleep(LOOK_UP)

    async def watch(self) -> None:
        """Starts again who dies, or hangs."""
        while not self._ending:
            for seat in self.seats:
                await self._end_if_it_hangs(seat)
                if (how := self._end_of(seat)) is None or self._ending:
                    continue
                if seat in self._hung:
                    # Requests may have held it up. The others serve, and must not end by what somebody does to one.
                    self._hung.discard(seat)
                    logger.error("API process %d %s; starting it again", seat, how)
                elif not self._may_start_again(seat, how):
                    return
                self._meeting.board.clear(seat)
                self._start_one(seat)
            await asyncio.sleep(RETRY if self._failed else LOOK_UP)

    def _may_start_again(self, seat: int, how: str) -> bool:
        """Counts a death, and gives up where there are too many."""
        now, limit = time.monotonic(), self._config.engine_restarts
        self._deaths.append(now)
        while self._deaths[0] < now - RESTART_WINDOW:
            self._deaths.popleft()
        if len(self._deaths) > limit:
            self._give_up(f"API process {seat} {how} ({len(self._deaths)} deaths in 10 minutes)")
            return False
        logger.error("API process %d %s; starting it again (%d of %d)", seat, how, len(self._deaths), limit)
        return True

    async def _end_if_it_hangs(self, seat: int) -> None:
        if self._end_of(seat) is not None:
            return
        process, pulse = self._processes[seat], self._pulses[seat]
        patience = PATIENCE if self._meeting.board.get(seat, SERVES) else START_PATIENCE
        if (silent := pulse.look(time.monotonic())) > patience:
            logger.error("API process %d has been silent for %.0f s and is killed; its stacks follow", seat, silent)
            process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(LAST_WORDS)  # where it is not stopped
            if self._meeting.board.get(seat, SERVES):
                self._hung.add(seat)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer may hold it: later
                await asyncio.to_thread(process.wait, LAST_SECONDS)

    def _end_of(self, seat: int) -> str | None:
        """How its process has come to an end; None: it runs."""
        if seat in self._failed:
            return f"could not be started: {self._failed[seat]}"
        code = self._processes[seat].poll()
        if code is None:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def end(self, number: signal.Signals) -> None:
        """Passes on what this process has been told: each ends in order, and at once the second time."""
        self._ending = True
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    async def close(self) -> None:
        """Returns when there are none."""
        self.end(signal.SIGTERM)
        deadline = time.monotonic() + self._config.shutdown_timeout + LAST_SECONDS
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() > deadline:
                self.kill()
            await asyncio.sleep(LOOK_UP)

    def kill(self) -> None:
        self._ending = True
        for process in self._processes.values():
            process.kill()

    def _start_one(self, seat: int) -> None:
        board = self._meeting.board
        spec = {
            "engine": dataclasses.asdict(self._engine()), "server": dataclasses.asdict(self._config),
            "sources": self._sources, "folder": self._meeting.folder, "seat": seat, "client": self._next_client,
            "secret": self._meeting.secret, "num_seats": board.num_seats, "board": board.descriptor,
            "socket": self._descriptor,
        }  # fmt: skip
        self._next_client += 1
        self._failed.pop(seat, None)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "vserve.server.api_process", "--parent", str(os.getpid()), *logs.arguments()],
                stdin=subprocess.PIPE, pass_fds=[self._descriptor, board.descriptor], start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._failed[seat] = str(error)
            return
        self._processes[seat], self._pulses[seat] = process, Pulse(board, seat)
        # Not as an argument: it has keys and the secret in it. On a thread: it may be more than a pipe holds.
        try:
            threading.Thread(target=_tell, args=(process, json.dumps(spec).encode()), daemon=True).start()
        except RuntimeError as error:  # no thread is left
            process.kill()
            self._failed[seat] = str(error)


def _tell(process: subprocess.Popen[bytes], spec: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:  # it is gone: whoever watches it sees that
        process.stdin.write(spec)


def options(config: type, given: dict[str, Any]) -> Any:
    """A dataclass of options from their JSON."""
    return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
