"""The API process's end of the engine: starts it, submits requests, gives each its mailbox, and notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

from ..engine.config import EngineConfig, default_cpu_threads
from ..engine.connection import Connection
from ..engine.messages import (
    AbortRequests,
    AddRequest,
    EngineInfo,
    EngineStart,
    EngineStats,
    Failure,
    FromEngine,
    Progress,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from ..engine.process import run_engine
from ..engine.request import SamplingParams

logger = logging.getLogger(__name__)


class EngineDeadError(Exception):
    """The engine is gone; the message is the cause, in one line."""


class Mailbox:
    """What the engine said of one request and nobody has read yet. A slow reader finds its outputs merged."""

    __slots__ = ("_error", "_output", "_waiter", "arrival", "finished", "id")

    def __init__(self, id: int, arrival: float) -> None:
        self.id = id
        self.arrival = arrival  # time.monotonic()
        self.finished = False  # the engine has said its last word
        self._output: RequestOutput | None = None
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def get(self) -> RequestOutput:
        """Waits for news. Raises EngineDeadError when none will come."""
        while self._output is None:
            if self._error is not None:
                raise EngineDeadError(self._error)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._output = self._output, None
        return output

    def put(self, output: RequestOutput) -> None:
        self._output = output if self._output is None else merge(self._output, output)
        self.finished = output.finish_reason is not None
        self._notify()

    def fail(self, error: str) -> None:
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request as one. The first one's lists are extended: a long pile-up stays linear."""
    token_ids, logprobs = first.token_ids, first.logprobs
    token_ids += second.token_ids
    if logprobs is None:
        logprobs = second.logprobs
    else:
        logprobs += second.logprobs or ()
    return RequestOutput(
        first.id,
        token_ids,
        second.finish_reason,
        second.stop_reason,
        logprobs,
        first.num_cached_tokens if first.num_cached_tokens is not None else second.num_cached_tokens,
        first.first_scheduled if first.first_scheduled is not None else second.first_scheduled,
        second.error,
    )


class EngineClient:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ready = False
        self.phase: Progress | None = None
        self.dead: str | None = None  # why, once the engine is gone
        self.info: EngineInfo
        self.stats = EngineStats()
        self.stats_listeners: list[Callable[[StepOutputs], None]] = []
        self.progress_listeners: list[Callable[[Progress], None]] = []
        self.death_listeners: list[Callable[[str], None]] = []
        self._mailboxes: dict[int, Mailbox] = {}
        self._next_id = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._send: Callable[[ToEngine], None]
        self._closing = False

    async def start(self) -> None:
        """Starts the engine and returns when it can serve. Raises EngineDeadError with the cause when it cannot."""
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.config.engine_in_process:
            self._task = asyncio.create_task(self._run_in_process())
        else:
            await self._spawn()
        await self._started

    def submit(
        self, token_ids: list[int], sampling: SamplingParams, *, priority: int = 0, cache_salt: str | None = None
    ) -> Mailbox:
        """Sends a request. Raises EngineDeadError when there is nobody to send it to."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        self._next_id += 1
        mailbox = Mailbox(self._next_id, time.monotonic())
        self._mailboxes[mailbox.id] = mailbox
        self._send(AddRequest(mailbox.id, token_ids, sampling, priority, cache_salt, mailbox.arrival))
        return mailbox

    def abort(self, mailboxes: Iterable[Mailbox]) -> None:
        """Idempotent; what has finished is left alone. Nothing more arrives in these mailboxes."""
        ids = [m.id for m in mailboxes if self._mailboxes.pop(m.id, None) is not None]
        if ids and self.dead is None:
            self._send(AbortRequests(ids))

    async def close(self) -> None:
        """Ends the engine. Idempotent."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        if self._connection is not None and self.dead is None:
            self._send(Shutdown())
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, 10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
        if self._connection is not None:
            self._connection.close()

    # ---- the engine's messages ----

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                mailbox = self._mailboxes.get(output.id)
                if mailbox is None:
                    continue  # aborted by us: the engine had not read it yet
                mailbox.put(output)
                if mailbox.finished:
                    del self._mailboxes[output.id]
            self.stats = message.stats
            for listener in self.stats_listeners:
                listener(message)
        elif isinstance(message, Progress):
            self.phase = message
            for report in self.progress_listeners:
                report(message)
        elif isinstance(message, EngineInfo):
            self.info = message
            self.ready = True
            self._started.set_result(None)
        elif isinstance(message, Failure):
            self._die(message.message)

    def _die(self, cause: str) -> None:
        """Fails everything that is open, at once. The first cause is the one that counts."""
        if self.dead is not None or self._closing:
            return
        self.dead = cause
        self.ready = False
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(cause)
        if not self._started.done():
            self._started.set_exception(EngineDeadError(cause))
        else:
            for listener in self.death_listeners:
                listener(cause)

    # ---- the engine as a process ----

    async def _spawn(self) -> None:
        # A socket pair has no name: nothing is left behind, whoever is killed.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = dict(os.environ)
        if self.config.device != "cuda":
            environment.setdefault("OMP_NUM_THREADS", str(self.config.cpu_threads or default_cpu_threads()))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vserve.engine.process", "--fd", str(theirs.fileno()),
                 "--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches this process, which then ends the other
                stdin=subprocess.DEVNULL,
                env=environment,
            )  # fmt: skip
        ours.setblocking(False)
        self._connection = await Connection.open(ours, FromEngine, self._receive, self._lost)
        self._send = self._connection.send
        self._send(EngineStart(dataclasses.asdict(self.config)))

    def _lost(self, error: Exception | None) -> None:
        if self._closing or self.dead is not None:
            return
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1)  # the socket closes a moment before the process is gone
        except subprocess.TimeoutExpired:
            cause = "the engine process closed its socket"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            hint = "; out of memory is the usual reason (dmesg tells)" if code == -9 else "; its last words are above"
            cause = f"the engine process {how}{hint}"
        self._die(cause)

    # ---- the engine in this process ----

    async def _run_in_process(self) -> None:
        submit: Callable[[ToEngine], None] | None = None

        def attach(function: Callable[[ToEngine], None]) -> None:
            nonlocal submit
            submit = function

        def send(message: ToEngine) -> None:
            assert submit is not None, "the engine is not ready"
            submit(message)

        self._send = send
        try:
            await run_engine(self.config, self._receive, attach)
        except Exception as error:
            logger.debug("engine failed", exc_info=error)
            self._die(str(error) or type(error).__name__)
