"""One engine process, from its start to its end: the socket to it, the signals for it, and what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...engine.link import logs
from ...engine.link.connection import Connection
from ...engine.link.messages import EngineStart, FromEngine, Shutdown
from ...engine.options.config import EngineConfig, default_cpu_threads

LEAVING = 3.0  # seconds for an engine to leave
RANKS_LEAVING = 6.0  # and for its ranks, which it waits for, and ends where they do not


class EngineProcess:
    def __init__(
        self, on_message: Callable[[Any], None], on_lost: Callable[[str], None], killed: Callable[[], str],
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """`on_lost` gets the cause in one line, once, when the process is gone without having been asked to; `killed`
        says it where that was by SIGKILL, as the system does when memory runs out. `listener`: where it finds further
        clients."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._killed = killed
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ending = False
        self._patience = LEAVING
        self._explaining: asyncio.Task[None] | None = None
        self.send: Callable[[Any], None]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it lives."""
        assert self._process is not None
        return self._process.poll()

    async def start(self, config: EngineConfig, variables: Mapping[str, str] = {}) -> None:
        """Returns when the process was started, long before it can serve. Raises OSError when it could not be."""
        # A socket pair has no name: nothing is left behind, whoever is killed.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {**os.environ, **variables}
        self._patience = LEAVING + (RANKS_LEAVING if config.world_size > 1 else 0.0)
        if config.device != "cuda":
            environment.setdefault("OMP_NUM_THREADS", str(config.cpu_threads or default_cpu_threads()))
        descriptors, more = [theirs.fileno()], []
        if self._listener is not None:
            descriptors.append(self._listener.fileno())
            more = ["--clients-fd", str(self._listener.fileno())]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "vserve.engine.start.process", "--fd", str(theirs.fileno()),
                     "--parent", str(os.getpid()), *more, *logs.arguments()],
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C reaches this process, which then ends the other
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._connection = await Connection.open(ours, FromEngine, self._on_message, self._connection_lost)
        self.send = self._connection.send
        self.send(EngineStart(dataclasses.asdict(config)))

    def is_stopped(self) -> bool:
        """By SIGSTOP, a debugger or a frozen container: no signal but SIGKILL and SIGCONT means anything to it."""
        return self._state() in ("T", "t")

    def is_suspended(self) -> bool:
        """By a signal (SIGSTOP, SIGTSTP). A debugger, which looks at it and has it go on, stops it otherwise."""
        return self._state() == "T"

    def _state(self) -> str:
        """As /proc has it; "" where that cannot be read."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return ""

    def dump_stacks(self) -> None:
        """Has the process write the stacks of its threads to stderr, whatever it is doing."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def end(self) -> None:
        """Asks it to leave, kills it where it does not. Idempotent; afterwards there is no process."""
        self._ending = True
        if self._process is not None:
            if self._connection is not None:
                self.send(Shutdown())
            if await self._wait(self._patience) is None:
                self.kill()
                await self._wait(None)
        if self._connection is not None:
            self._connection.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # nothing once its end has been noticed: the pid may be another's

    async def _wait(self, seconds: float | None) -> int | None:
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return None

    def _connection_lost(self, error: Exception | None) -> None:
        if not self._ending:
            self._explaining = asyncio.create_task(self._explain())

    async def _explain(self) -> None:
        code = await self._wait(2.0)  # it leaves when it has said why, or is gone
        if self._ending:
            return
        if code is None:
            self._on_lost("the engine process closed its socket")
            return
        if code == -signal.SIGKILL:
            self._on_lost(self._killed())
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._on_lost(f"the engine process {how}; its last words are above")
