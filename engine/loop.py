"""The engine loop: inbox → schedule → launch → take the oldest result → outbox. It alone drives the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from .config import SchedulerConfig
from .executor import Executor
from .grammar import Grammars, Matcher
from .mask import make_mask
from .messages import (
    AbortRequests,
    AddGrammar,
    AddRequest,
    DropGrammars,
    EngineStats,
    FromEngine,
    RequestOutput,
    SetVocabulary,
    Shutdown,
    StepOutputs,
    StepReport,
    ToEngine,
    WatchSteps,
)
from .pacing import Kind, Pacer
from .plan import StepResult
from .request import FinishReason, Request, unknown_token
from .scheduler import Scheduler
from .thinking import ThinkingMatcher
from .watch import StepWatch

logger = logging.getLogger(__name__)

SHORTEST_WAIT = 0.3e-3  # seconds; below, waiting costs more than it gives
TIMER_PRECISION = 1.5e-3  # of the event loop


@dataclass(frozen=True)
class StepRecord:
    """What one of the last steps did; for whoever looks into the engine."""

    step: int
    num_requests: int
    num_tokens: int
    num_decodes: int
    host_seconds: float
    device_seconds: float


@dataclass(slots=True)
class InFlight:
    """What is remembered of a plan until its result is in."""

    step: int
    num_requests: int
    num_tokens: int
    num_decodes: int
    kind: Kind
    host_seconds: float
    watched: list[tuple[int, int, bool]] | None  # StepWatch.rows, where somebody watches


class EngineLoop:
    def __init__(
        self, config: SchedulerConfig, executor: Executor, send: Callable[[FromEngine], None], *, seed: int = 0
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.executor = executor
        self.history: deque[StepRecord] = deque(maxlen=1024)
        self._send = send
        self._random = random.Random(seed)
        self._vocab_size = executor.runner.model.config.vocab_size
        self._grammars = Grammars()
        self._broken_grammars: dict[str, str] = {}  # why requests that name them must fail
        self._held: dict[int, AddRequest] = {}  # until their grammars are loaded, by request id
        self._inbox: deque[ToEngine] = deque()
        self._wake = asyncio.Event()
        self._plans: deque[InFlight] = deque()
        self._pacer = Pacer()
        self._unsampled = False  # the newest of them waits for its mask, and that for the results of the others
        self._host_seconds = 0.0
        self._device_seconds = 0.0
        self._watch: StepWatch | None = None  # where somebody watches

    def submit(self, message: ToEngine) -> None:
        """Called on the loop's thread. What is submitted before a step is scheduled is seen by it."""
        self._inbox.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Until a Shutdown message; raises when the device is lost."""
        while True:
            if not self._drain_inbox():
                return
            if await self._hold_back() and not self._drain_inbox():
                return
            self._launch()
            if self._plans:
                oldest = asyncio.ensure_future(self.executor.result())
                if not await self._drain_inbox_until(oldest):
                    return
                self._finish_oldest(oldest)
            else:
                self._wake.clear()
                if self._watch is not None:
                    self._watch.rest()
                if not self._inbox:
                    await self._wake.wait()

    async def _hold_back(self) -> bool:
        """With one step in flight and nobody waiting, the next is launched late: who arrives by then is in it.

        Returns whether time has passed.
        """
        if len(self._plans) != 1 or self.config.depth == 1 or self._unsampled or self.scheduler.roster.waiting:
            return False
        until = time.perf_counter() + self._pacer.slack(time.perf_counter())
        left = until - time.perf_counter()
        if left < SHORTEST_WAIT:
            return False
        if left > TIMER_PRECISION and await self.executor.wait(left - TIMER_PRECISION):
            return True
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)  # the event loop's timers are no finer than a millisecond
        await asyncio.sleep(0)  # reads what has arrived
        return True

    async def _drain_inbox_until(self, result: asyncio.Future[StepResult]) -> bool:
        """What arrives during a step is taken in at once: hundreds of prompts would make the next launch late."""
        result.add_done_callback(lambda _: self._wake.set())
        while not result.done():
            self._wake.clear()
            await self._wake.wait()
            if not self._drain_inbox():
                return False
        return True

    def _drain_inbox(self) -> bool:
        outputs: list[RequestOutput] = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, AddRequest):
                outputs += self._add(message)
            elif isinstance(message, AbortRequests):
                outputs += self._abort(message)
            elif isinstance(message, Shutdown):
                return False
            elif isinstance(message, WatchSteps):
                self._watch = StepWatch(self.scheduler.kv, self._send) if message.on else None
            else:
                self._change_grammars(message)
        if outputs:
            self._emit(outputs, 0)
        return True

    def _abort(self, message: AbortRequests) -> list[RequestOutput]:
        held = self._held.keys() & message.ids
        ids = [id for id in message.ids if id not in held]
        if message.unless_begun and self.scheduler.has_begun(ids):
            return []
        for id in held:
            del self._held[id]
        return [RequestOutput(id, [], FinishReason.ABORT) for id in held] + self.scheduler.abort(ids)

    def _add(self, message: AddRequest) -> list[RequestOutput]:
        sampling = message.sampling
        grammar: Matcher | None = None
        error = self._problem(message)
        if error is None and sampling.grammar is not None:
            try:
                grammar = self._grammars.matcher(sampling.grammar)
                if not grammar.ready:
                    self._hold(message, grammar)
                    return []
            except Exception as failure:
                reason = "the engine was not told of it" if isinstance(failure, KeyError) else str(failure)
                reason = self._broken_grammars.get(sampling.grammar, reason)
                error = f"the grammar of this request cannot be used: {reason}"
        if error is not None:
            return [RequestOutput(message.id, [], FinishReason.ERROR, error=error)]
        if sampling.thinking is not None:
            grammar = ThinkingMatcher(
                sampling.thinking, grammar, [token for token in sampling.eos_token_ids if token < self._vocab_size]
            )
        if sampling.seed is None and sampling.temperature > 0:
            sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(63))
        request = Request(
            message.id, message.token_ids, sampling,
            priority=message.priority, cache_salt=message.cache_salt, arrival=message.arrival, grammar=grammar,
        )  # fmt: skip
        try:
            self.scheduler.add(request)
        except Exception as failure:  # nobody else's: it is not in the queue yet
            logger.error("request %d cannot be scheduled", message.id, exc_info=failure)
            return [RequestOutput(message.id, [], FinishReason.ERROR, error=f"{type(failure).__name__}: {failure}")]
        return []

    def _hold(self, message: AddRequest, grammar: Matcher) -> None:
        """Nobody waits for the loading of a grammar but who needs it."""
        loop = asyncio.get_running_loop()

        def resume() -> None:
            # At once, not by way of the inbox: an abort that is already waiting there has to find the request.
            if self._held.pop(message.id, None):
                if outputs := self._add(message):
                    self._emit(outputs, 0)
                self._wake.set()

        def loaded() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(resume)

        self._held[message.id] = message
        grammar.when_ready(loaded)

    def _problem(self, message: AddRequest) -> str | None:
        """The front end has checked all of this; a request that slips through must not take the engine with it."""
        length, limit = len(message.token_ids), self.config.max_model_len - (message.sampling.pooling is None)
        if not 0 < length <= limit:
            return f"the prompt has {length} tokens: at least 1 and at most {limit} fit this engine"
        if not self.config.enable_chunked_prefill and length > self.config.max_num_batched_tokens:
            return (
                f"the prompt has {length} tokens and chunked prefill is off: at most "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens} fit one step"
            )
        if (token := unknown_token(message.token_ids, self._vocab_size)) is not None:
            # reading beyond the embeddings would cost a GPU
            return f"the prompt has the token id {token}; the vocabulary ends at {self._vocab_size - 1}"
        return message.sampling.problem(self._vocab_size)

    def _change_grammars(self, message: SetVocabulary | AddGrammar | DropGrammars) -> None:
        """What goes wrong here is told to the requests that name the grammar."""
        try:
            if isinstance(message, SetVocabulary):
                self._grammars.set_vocabulary(message)
            elif isinstance(message, AddGrammar):
                self._broken_grammars.pop(message.key, None)
                self._grammars.add(message)
            else:
                for key in message.keys:
                    self._broken_grammars.pop(key, None)
                self._grammars.drop(message.keys)
        except Exception as error:
            logger.warning("%s failed", type(message).__name__, exc_info=error)
            if isinstance(message, AddGrammar):
                self._broken_grammars[message.key] = f"{type(error).__name__}: {error}"

    def _launch(self) -> None:
        """Steps until `depth` are in flight, or until one has to wait for its mask."""
        if self._unsampled and len(self._plans) == 1:
            self._sample_constrained()
        while len(self._plans) < self.config.depth and not self._unsampled:
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            if plan is None:
                return
            constrained = self.scheduler.in_flight[-1].constrained
            try:
                self.executor.execute(plan)
                if not constrained:
                    self.executor.sample()
            except Exception as error:
                self._fail(plan.step, error)
                continue
            now = time.perf_counter()
            spent = now - started
            self._pacer.launched(plan, spent, not self._plans, now)
            watched = StepWatch.rows(self.scheduler.in_flight[-1]) if self._watch is not None else None
            self._plans.append(
                InFlight(
                    plan.step, len(plan.rows), plan.total_tokens, plan.num_decodes, self._pacer.kind(plan), spent,
                    watched,
                )
            )  # fmt: skip
            if constrained:
                self._unsampled = True
                if len(self._plans) == 1:
                    self._sample_constrained()

    def _sample_constrained(self) -> None:
        """The results of all earlier steps are in: the grammars know every token before those to be sampled."""
        self._unsampled = False
        started = time.perf_counter()
        mask, errors = make_mask(self.scheduler.in_flight[-1].sampled, self._vocab_size)
        if errors:
            self._emit([self.scheduler.reject(request, error) for request, error in errors], 0)
        try:
            self.executor.sample(mask)
        except Exception as error:
            self._fail(self._plans.pop().step, error)
            return
        self._plans[-1].host_seconds += time.perf_counter() - started

    def _finish_oldest(self, oldest: asyncio.Future[StepResult]) -> None:
        plan = self._plans.popleft()
        try:
            result = oldest.result()
        except Exception as error:
            self._fail(plan.step, error)
            return
        started = time.perf_counter()
        self._pacer.finished(plan.kind, result.device_seconds, started)
        outputs = self.scheduler.update(result)
        host_seconds = plan.host_seconds + time.perf_counter() - started
        self._host_seconds += host_seconds
        self._device_seconds += result.device_seconds
        self.history.append(
            StepRecord(
                plan.step, plan.num_requests, plan.num_tokens, plan.num_decodes, host_seconds, result.device_seconds
            )
        )
        self._emit(outputs, plan.num_tokens)
        if self._watch is not None and plan.watched is not None:
            report = StepReport(
                plan.step, time.monotonic(), round(1e6 * host_seconds), round(1e6 * result.device_seconds),
                plan.num_requests, plan.num_tokens, plan.num_decodes, plan.watched,
            )  # fmt: skip
            self._watch.add(report)
        if not self.scheduler.has_unfinished() and not self._plans:
            self.scheduler.check_invariants()

    def _fail(self, step: int, error: Exception) -> None:
        """Only the step's own requests fail, unless the device is gone."""
        logger.error("step %d failed: %s: %s", step, type(error).__name__, error, exc_info=error)
        if self.executor.asynchronous:
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                raise RuntimeError(f"the GPU is lost ({lost}); restart vserve") from error
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        self._emit(self.scheduler.fail(step, message), 0)

    def _emit(self, outputs: list[RequestOutput], step_tokens: int) -> None:
        stats: EngineStats = msgspec.structs.replace(
            self.scheduler.stats(self._device_seconds, self._host_seconds),
            step_tokens=step_tokens,  # 0 where no step is reported: a step must not be counted twice
            num_graph_misses=self.executor.runner.num_graph_misses,
            num_late_compilations=self.executor.runner.num_late_compilations,
        )
        preempted, self.scheduler.preempted = self.scheduler.preempted, []
        self._send(StepOutputs(outputs, stats, preempted))
