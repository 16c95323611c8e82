"""The API process's side of the engine: submits requests, gives each its mailbox, and starts the engine again when it
dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ...engine.link.media import MediaItem
from ...engine.link.messages import (
    AdapterLoaded,
    DropAdapter,
    EngineInfo,
    EngineStats,
    Failure,
    FromEngine,
    Heartbeat,
    LastSteps,
    LoadAdapter,
    Progress,
    ReadSteps,
    StepOutputs,
    StepRecord,
    StepReports,
    ToEngine,
    WatchSteps,
    pack_tokens,
    sum_of,
)
from ...engine.link.sampling_params import SamplingParams, unknown_token_problem
from ...engine.options.config import EngineConfig
from ...engine.planning.host_memory import killed
from .engine import Engine, make_engine
from .mailbox import EngineDeadError, EngineRefusedError, Mailbox, refused
from .meeting import Meeting
from .open_requests import OpenRequests
from .routing import ANYWHERE, Route

logger = logging.getLogger(__name__)

RESTART_WINDOW = 600.0  # seconds in which `restarts` deaths are forgiven
MAX_PAUSE = 8.0  # before another attempt, when the last one failed too
PATIENCE = 10.0  # seconds for an answer that no step has to be waited for


class EngineClient:
    def __init__(
        self, config: EngineConfig, *, restarts: int = 0, name: str = "", environment: Mapping[str, str] = {},
        index: int = 0, meeting: Meeting | None = None,
    ) -> None:  # fmt: skip
        """`restarts`: how often within RESTART_WINDOW an engine that died is replaced by another. `environment`: of its
        process, beside this one's. `meeting`: of several API processes, of which the first one starts the engine, which
        is number `index`, and the others find it."""
        self.config = config
        self._prefix = f"{name}: " if name else ""  # of lines in the log
        self.ready = False
        self.phase: Progress | None = None
        self.down: str | None = None  # why the last engine died, until the next one is ready
        self.dead: str | None = None  # the same, once there will be no other
        self.stalled: float | None = None  # for so many seconds; the watchdog's word
        self.epoch = 0  # engines started so far: what an earlier one was told, this one does not know
        self.num_restarts = 0  # that succeeded
        self.num_stalls = 0
        self.num_heartbeats = 0
        self.info: EngineInfo
        self.stats = EngineStats()
        self.past_stats = EngineStats()  # sums over the engines before this one
        self.stats_listeners: list[Callable[[StepOutputs], None]] = []
        self.progress_listeners: list[Callable[[Progress], None]] = []
        self.step_listeners: list[Callable[[StepReports], None]] = []  # see watch_steps
        self.death_listeners: list[Callable[[str], None]] = []  # called when there will be no other engine
        # Given the mailboxes of an engine that died, whose requests it had said nothing of; returns those that nobody
        # else has taken.
        self.rescue: Callable[[list[Mailbox]], list[Mailbox]] = lambda mailboxes: mailboxes
        self.requests = OpenRequests(self.send, 0 if meeting is None else meeting.first_id)
        self.submit_packed, self.adopt = self.requests.submit_packed, self.requests.adopt
        self.abort, self.expire, self.fail_all = self.requests.abort, self.requests.expire, self.requests.fail_all
        self._environment = environment
        self._index, self._meeting = index, meeting
        self._is_guest = meeting is not None and not meeting.is_first
        self._restarts = restarts
        self._deaths: deque[float] = deque()  # of engines that had been ready, or should have replaced one
        self._readers: dict[int, asyncio.Future[list[StepRecord]]] = {}  # who waits for LastSteps
        self.adapters: dict[int, LoadAdapter] = {}  # that every engine is told of when it is ready
        self._loading: dict[int, asyncio.Future[AdapterLoaded]] = {}  # who waits for an adapter
        self._engine: Engine | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._send: Callable[[ToEngine], None]
        self._closing = False
        self._begun = 0.0  # time.monotonic() when this engine was started
        self._startup_seconds = 5.0  # of the last engine that became ready

    async def start(self) -> None:
        """Starts the engine and returns when it can serve. Raises EngineDeadError with the cause when it cannot."""
        try:
            await self._start_engine()
        except EngineDeadError as error:
            self.dead = str(error)
            raise

    def send(self, message: ToEngine) -> None:
        """Raises EngineDeadError when there is nobody to send it to."""
        if not self.ready:
            raise EngineDeadError(self.down or "the engine is not ready")
        self._send(message)

    def submit(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, priority: int = 0, cache_salt: str | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> Mailbox:  # fmt: skip
        """Sends a request. Raises EngineDeadError when there is nobody to send it to."""
        (mailbox,) = self.submit_choices(1, token_ids, sampling, priority=priority, cache_salt=cache_salt, media=media)
        return mailbox

    def submit_choices(
        self,
        n: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: int = 0,
        route: Route = ANYWHERE,
        media: tuple[MediaItem, ...] = (),
    ) -> list[Mailbox]:
        """Sends `n` requests for one prompt, which travels once; each samples by its SamplingParams.of_choice.
        `media`: the prompt's pictures, in its order. There is one engine: `route` changes nothing."""
        try:
            prompt = pack_tokens(token_ids)
        except OverflowError:  # it has slipped through all checks; no engine has such a token
            return refused(n, unknown_token_problem(token_ids, self.info.vocab_size))
        return self.submit_packed(
            n, prompt, sampling, priority=priority, cache_salt=cache_salt, tenant=tenant, media=media
        )

    def watch_steps(self, listener: Callable[[StepReports], None]) -> None:
        """From now on `listener` gets the reports, which engines make only while there is a listener."""
        self.step_listeners.append(listener)
        if self.ready:  # also where others watch: the newcomer needs the whole block map
            self._send(WatchSteps(True))

    def unwatch_steps(self, listener: Callable[[StepReports], None]) -> None:
        self.step_listeners.remove(listener)
        if not self.step_listeners and self.ready:
            self._send(WatchSteps(False))

    async def last_steps(self, count: int) -> list[StepRecord]:
        """At most `count`, of which the engine remembers HISTORY; the latest last. Raises EngineDeadError when there is
        no engine to ask or it dies meanwhile, TimeoutError when it says nothing for PATIENCE seconds."""
        (id,) = self.requests.new_ids()
        self.send(ReadSteps(id, count))
        self._readers[id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._readers[id], PATIENCE)
        finally:
            del self._readers[id]

    async def load_adapter(self, message: LoadAdapter) -> AdapterLoaded:
        """The engine's answer. Raises EngineDeadError when there is no engine to ask or it dies meanwhile."""
        self.send(message)
        self._loading[message.id] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._loading[message.id]
        finally:
            del self._loading[message.id]
        if answer.error is None:
            # An engine that starts again has to find what this one has loaded.
            self.adapters[message.id] = msgspec.structs.replace(message, version=answer.version)
        return answer

    def know_adapter(self, message: LoadAdapter) -> None:
        self.adapters[message.id] = message

    def drop_adapter(self, id: int) -> None:
        self.adapters.pop(id, None)
        if self.ready and not self._is_guest:  # of several API processes, the first one knows when all are done with it
            self._send(DropAdapter(id))

    @property
    def engines(self) -> Sequence[EngineClient]:
        return (self,)

    @property
    def num_open(self) -> int:
        """Requests that wait for the engine's next word."""
        return len(self.requests)

    @property
    def waiting_tokens(self) -> int:
        """Of prompts that it has said nothing of."""
        return self.requests.waiting_tokens

    @property
    def retry_after(self) -> int:
        """Seconds after which an engine that is being restarted is likely to serve again."""
        left = self._startup_seconds - (time.monotonic() - self._begun) if self.down is None else self._startup_seconds
        return min(60, max(1, math.ceil(left)))

    def dump_stacks(self) -> bool:
        """Of the engine's threads, to stderr. False when it is no process that could do so now."""
        if self._engine is None or self._engine.is_stopped():
            return False
        self._engine.dump_stacks()
        return True

    def is_suspended(self) -> bool:
        """Whether a signal has stopped its process, also while it starts."""
        return self._engine is not None and self._engine.is_suspended()

    def give_up_on_engine(self, cause: str) -> None:
        """Ends an engine that hangs; what happens next is what happens after any death."""
        if self._engine is not None:
            self._engine.kill()
        self._down(cause)

    def kill(self) -> None:
        """Ends the engine at once, for whoever leaves at once."""
        self._closing = True
        if self._engine is not None:
            self._engine.kill()

    async def close(self) -> None:
        """Ends the engine. Idempotent."""
        self._closing = True
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._restarting
        if self._engine is not None:
            await self._engine.end()

    # ---- the engine's messages ----

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self.requests.receive(message)
            self.stats = message.stats
            for listener in self.stats_listeners:
                listener(message)
        elif isinstance(message, StepReports):
            for watcher in self.step_listeners:
                watcher(message)
        elif isinstance(message, LastSteps):
            reader = self._readers.get(message.id)
            if reader is not None and not reader.done():
                reader.set_result(message.steps)
        elif isinstance(message, AdapterLoaded):
            loading = self._loading.get(message.id)
            if loading is not None and not loading.done():
                loading.set_result(message)
            elif message.error is not None and message.id in self.adapters:
                logger.error("%sa new engine cannot load an adapter: %s", self._prefix, message.error)
        elif isinstance(message, Heartbeat):
            self.num_heartbeats += 1
        elif isinstance(message, Progress):
            self.phase = message
            for report in self.progress_listeners:
                report(message)
        elif isinstance(message, EngineInfo):
            self.info = message
            self.ready = True
            self.down = None
            self._startup_seconds = time.monotonic() - self._begun
            if self.step_listeners:  # they have seen the last engine die
                self._send(WatchSteps(True))
            for adapter in self.adapters.values():
                self._send(adapter)
            if not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, Failure):
            self._down(message.message, EngineRefusedError if message.is_refusal else EngineDeadError)

    # ---- its life and death ----

    async def _start_engine(self) -> None:
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun = time.monotonic()
        self.phase = None
        self.epoch += 1
        self.past_stats, self.stats = sum_of(self.past_stats, self.stats), EngineStats()
        engine = self._engine = make_engine(
            self.config, self._meeting, self._index,
            lambda message: self._receive(message) if engine is self._engine else None,
            lambda cause: self._down(cause) if engine is self._engine else None,
            self._killed,
        )  # fmt: skip
        try:
            await engine.start(self.config, self._environment)
        except OSError as error:
            raise EngineDeadError(f"the engine process cannot be started: {error}") from None
        self._send = engine.send
        await self._started

    def _down(self, cause: str, kind: type[EngineDeadError] = EngineDeadError) -> None:
        """Fails everything that is open, at once. The first cause of a death is the one that counts."""
        if self._closing or self.dead is not None:
            return
        if not self._started.done():  # whoever starts it goes on from here
            self._started.set_exception(kind(cause))
        elif self.ready:
            self.ready = False
            self.down = cause
            self.stalled = None
            self.requests.hand_over(self.rescue)
            self.fail_all(EngineDeadError(cause))
            waits: list[asyncio.Future[Any]] = [*self._readers.values(), *self._loading.values()]
            for waiting in waits:
                if not waiting.done():
                    waiting.set_exception(EngineDeadError(cause))
            if self._may_restart():
                self._restarting = asyncio.create_task(self._restart())

    def _killed(self) -> str:
        if self.ready or self.phase is None:
            return "the engine process was killed by signal 9; out of memory is the usual reason (dmesg tells)"
        return killed(self.phase.phase, self.phase.done, self.phase.total, self.config)

    def _may_restart(self) -> bool:
        if self._is_guest:  # who has started it says what becomes of it
            return True
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - RESTART_WINDOW:
            self._deaths.popleft()
        if len(self._deaths) <= self._restarts and not self.config.engine_in_process:
            logger.error(
                "%s%s; starting it again (%d of %d)", self._prefix, self.down, len(self._deaths), self._restarts
            )
            return True
        if self._restarts and len(self._deaths) > self._restarts:
            self.down = f"{self.down} ({len(self._deaths)} deaths in {RESTART_WINDOW / 60:.0f} minutes)"
        self.dead = self.down
        for listener in self.death_listeners:
            listener(self.dead or "")
        return False

    async def _restart(self) -> None:
        pause = 0.0
        while True:
            if self._engine is not None:
                await self._engine.end()
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE, 2 * pause + 1)
            try:
                await self._start_engine()
            except EngineDeadError as error:
                self.down = str(error)
                if not self._may_restart():
                    return
            else:
                self.num_restarts += 1
                if not self._is_guest:
                    logger.warning("%sthe engine serves again after %.1f s", self._prefix, self._startup_seconds)
                return
