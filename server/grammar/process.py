"""The compiler of grammars as the API process sees it: started with its first job, started again when it dies, given
no more than it can have in work at once."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Hashable

from ...engine.link.connection import Connection
from ...engine.link.messages import SetVocabulary
from .constraint import Compile, Constraint, Drop, FromCompiler
from .queue import NUM_CHILDREN, CompileQueue, Job

logger = logging.getLogger(__name__)

MAX_DEATHS = 3  # of the process while it holds a job, after which the job is given up
PATIENCE = 60.0  # seconds without any answer beyond a job's own time, after which the process is thought to hang


class CompilerError(Exception):
    """The process cannot be kept alive: nothing that the client did."""


class CompilerProcess:
    def __init__(
        self,
        vocabulary: Callable[[], Awaitable[SetVocabulary]],
        timeout: float,
        prepared: Callable[[SetVocabulary], None],
    ) -> None:
        """`vocabulary` is asked at each start; `timeout`: seconds for one grammar; `prepared` is called with the
        vocabulary as engines get it, before anything is compiled."""
        self.num_restarts = 0
        self._read_vocabulary = vocabulary
        self._timeout = timeout
        self._prepared = prepared
        self._queue = CompileQueue()
        self._running: dict[int, Job] = {}  # by id
        self._next_id = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def num_waiting(self) -> int:
        """Those that run are none of them."""
        return len(self._queue)

    def submit(self, constraint: Constraint, owner: Hashable) -> Job:
        """Whose result raises CompilerError, or is cancelled where nobody wants it any more."""
        self._next_id += 1
        message = Compile(self._next_id, constraint, self._timeout)
        job = Job(message, owner, asyncio.get_running_loop().create_future())
        self._queue.add(job)
        if self._watchdog is None:
            self._watch()
        if self._connection is None:
            self._begin()
        else:
            self._fill()
        return job

    def set_wanted(self, job: Job, is_wanted: bool) -> None:
        """Whether anybody waits for it. One that nobody wants leaves the queue; one that runs is ended where another
        one needs its place."""
        job.is_wanted = is_wanted
        if is_wanted or job.result.done():
            return
        if not job.is_running:
            self._queue.remove(job)
            job.result.cancel()
        else:
            self._fill()

    def give_way(self, owner: Hashable) -> Job | None:
        """A job that waits is taken from whoever has the most of them, for one of `owner`; None where `owner` has as
        many. Its result is the caller's to say."""
        if (job := self._queue.greediest(owner)) is not None:
            self._queue.remove(job)
        return job

    def _fill(self) -> None:
        """Has the children work, those first on what somebody waits for."""
        if self._connection is None:
            return
        while len(self._running) < NUM_CHILDREN and (job := self._queue.take(self._running.values())) is not None:
            job.is_running = True
            self._running[job.message.id] = job
            self._connection.send(job.message)
        for job in list(self._running.values()):
            if len(self._queue) and not job.is_wanted:
                self._connection.send(Drop(job.message.id))
                del self._running[job.message.id]
                job.result.cancel()
                return self._fill()

    def _begin(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        """Starts the process and tells it what it had in work when it died, if it did."""
        logger.info("starting the grammar compiler; structured outputs wait some seconds for it")
        try:
            vocabulary = await self._read_vocabulary()
        except Exception as error:
            logger.error("the vocabulary cannot be read", exc_info=error)
            self._starting = None
            self._fail(self._jobs, f"the model's tokens cannot be read: {type(error).__name__}: {error}")
            return
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
            self._connection = await Connection.open(ours, FromCompiler, self._receive, self._lost)
        except OSError as error:
            ours.close()
            self._fail(self._jobs, f"the grammar compiler cannot be started: {error}")
            return
        finally:
            self._starting = None
        self._connection.send(vocabulary)
        for job in self._running.values():
            self._connection.send(job.message)
        self._fill()

    @property
    def _jobs(self) -> list[Job]:
        """Whose results somebody waits for, or may."""
        return [*self._running.values(), *self._queue]

    def _receive(self, message: FromCompiler) -> None:
        if isinstance(message, SetVocabulary):
            self._prepared(message)
        elif (job := self._running.pop(message.id, None)) is not None:
            if not job.result.done():  # whoever waited for it has left
                job.result.set_result(message)
            self._fill()
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
        for job in self._running.values():
            job.deaths += 1
        given_up = [job for job in self._running.values() if job.deaths >= MAX_DEATHS or not job.is_wanted]
        self._fail(given_up, "the grammar compiler keeps dying")
        if self._jobs:
            self._begin()

    def _fail(self, jobs: list[Job], cause: str) -> None:
        for job in jobs:
            if job.is_running:
                del self._running[job.message.id]
            else:
                self._queue.remove(job)
            if not job.result.done():
                job.result.set_exception(CompilerError(cause))

    def _watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = asyncio.get_running_loop().call_later(self._timeout + PATIENCE, self._check)

    def _check(self) -> None:
        self._watchdog = None
        if self._jobs:
            if self._process is not None:
                self._process.kill()  # the socket closes, and the rest is as after any death
            self._watch()

    async def close(self) -> None:
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        self._fail(self._jobs, "the server is shutting down")
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
