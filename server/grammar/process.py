"""The compiler of grammars as the API process sees it: started with its first job, started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from ...engine.connection import Connection
from ...engine.messages import SetVocabulary
from .constraint import Compile, Compiled, Constraint

logger = logging.getLogger(__name__)

MAX_DEATHS = 3  # of the process while it holds a job, after which the job is given up
PATIENCE = 60.0  # seconds without any answer beyond a job's own time, after which the process is thought to hang


class CompilerError(Exception):
    """The process cannot be kept alive: nothing that the client did."""


@dataclass
class _Job:
    message: Compile
    result: asyncio.Future[Compiled]
    deaths: int = 0


class CompilerProcess:
    def __init__(self, vocabulary: SetVocabulary, timeout: float) -> None:
        """`timeout`: seconds for one grammar."""
        self.num_restarts = 0
        self._vocabulary = vocabulary
        self._timeout = timeout
        self._jobs: dict[int, _Job] = {}
        self._next_id = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def compile(self, constraint: Constraint) -> Compiled:
        """Raises CompilerError."""
        loop = asyncio.get_running_loop()
        self._next_id += 1
        message = Compile(self._next_id, constraint, self._timeout)
        job = self._jobs[message.id] = _Job(message, loop.create_future())
        if self._connection is not None:
            self._connection.send(message)
        elif self._starting is None:
            self._starting = asyncio.create_task(self._start())
        if self._watchdog is None:
            self._watch()
        try:
            return await job.result
        finally:
            self._jobs.pop(message.id, None)

    async def _start(self) -> None:
        """Starts the process and tells it everything that waits."""
        logger.info("starting the grammar compiler; structured outputs wait some seconds for it")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # One thread: the process forks.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "vserve.server.grammar.worker", "--fd", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            ours.setblocking(False)
            self._connection = await Connection.open(ours, Compiled, self._receive, self._lost)
        except OSError as error:
            ours.close()
            self._fail(list(self._jobs.values()), f"the grammar compiler cannot be started: {error}")
            return
        finally:
            self._starting = None
        self._connection.send(self._vocabulary)
        for job in self._jobs.values():
            self._connection.send(job.message)

    def _receive(self, message: Compiled) -> None:
        if (job := self._jobs.get(message.id)) is not None and not job.result.done():
            job.result.set_result(message)
        self._watch()

    def _lost(self, error: Exception | None) -> None:
        self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._closing:
            return
        logger.warning("the grammar compiler died; it is started again when needed")
        self.num_restarts += 1
        for job in self._jobs.values():
            job.deaths += 1
        self._fail([job for job in self._jobs.values() if job.deaths >= MAX_DEATHS], "the grammar compiler keeps dying")
        if any(not job.result.done() for job in self._jobs.values()) and self._starting is None:
            self._starting = asyncio.create_task(self._start())

    def _fail(self, jobs: list[_Job], cause: str) -> None:
        for job in jobs:
            if not job.result.done():
                job.result.set_exception(CompilerError(cause))

    def _watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = asyncio.get_running_loop().call_later(self._timeout + PATIENCE, self._check)

    def _check(self) -> None:
        self._watchdog = None
        if any(not job.result.done() for job in self._jobs.values()):
            if self._process is not None:
                self._process.kill()  # the socket closes, and the rest is as after any death
            self._watch()

    async def close(self) -> None:
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        self._fail(list(self._jobs.values()), "the server is shutting down")
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
