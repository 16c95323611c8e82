"""The engine loop: inbox → schedule → launch → take the oldest result → outbox. It alone drives the scheduler."""

from __future__ import annotations

import asyncio
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
from .messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    FromEngine,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from .request import FinishReason, Request
from .scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """What one of the last steps did; for whoever looks into the engine."""

    step: int
    num_requests: int
    num_tokens: int
    num_decodes: int
    host_seconds: float
    device_seconds: float


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
        self._inbox: deque[ToEngine] = deque()
        self._wake = asyncio.Event()
        self._plans: deque[tuple[int, int, int, int, float]] = deque()  # what StepRecord wants of the plans in flight
        self._host_seconds = 0.0
        self._device_seconds = 0.0

    def submit(self, message: ToEngine) -> None:
        """Called on the loop's thread. What is submitted before a step is scheduled is seen by it."""
        self._inbox.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Until a Shutdown message; raises when the device is lost."""
        while True:
            if not self._drain_inbox():
                return
            self._launch()
            if self._plans:
                await self._finish_oldest()
            else:
                self._wake.clear()
                if not self._inbox:
                    await self._wake.wait()

    def _drain_inbox(self) -> bool:
        outputs: list[RequestOutput] = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, AddRequest):
                outputs += self._add(message)
            elif isinstance(message, AbortRequests):
                outputs += self.scheduler.abort(message.ids)
            elif isinstance(message, Shutdown):
                return False
        if outputs:
            self._emit(outputs, 0)
        return True

    def _add(self, message: AddRequest) -> list[RequestOutput]:
        sampling = message.sampling
        # The front end has checked all of this; a request that slips through must not take the engine with it.
        if not 0 < len(message.token_ids) < self.config.max_model_len:
            error = (
                f"the prompt has {len(message.token_ids)} tokens: at least 1 and at most "
                f"{self.config.max_model_len - 1} fit this engine"
            )
            return [RequestOutput(message.id, [], FinishReason.ERROR, error=error)]
        if not self.config.enable_chunked_prefill and len(message.token_ids) > self.config.max_num_batched_tokens:
            error = (
                f"the prompt has {len(message.token_ids)} tokens and chunked prefill is off: at most "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens} fit one step"
            )
            return [RequestOutput(message.id, [], FinishReason.ERROR, error=error)]
        if sampling.seed is None and sampling.temperature > 0:
            sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(63))
        request = Request(
            message.id, message.token_ids, sampling,
            priority=message.priority, cache_salt=message.cache_salt, arrival=message.arrival,
        )  # fmt: skip
        self.scheduler.add(request)
        return []

    def _launch(self) -> None:
        while len(self._plans) < self.config.depth:
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            if plan is None:
                return
            try:
                self.executor.execute(plan)
            except Exception as error:
                self._fail(plan.step, error)
                continue
            spent = time.perf_counter() - started
            self._plans.append((plan.step, len(plan.rows), plan.total_tokens, plan.num_decodes, spent))

    async def _finish_oldest(self) -> None:
        step, num_requests, num_tokens, num_decodes, host_seconds = self._plans.popleft()
        try:
            result = await self.executor.result()
        except Exception as error:
            self._fail(step, error)
            return
        started = time.perf_counter()
        outputs = self.scheduler.update(result)
        host_seconds += time.perf_counter() - started
        self._host_seconds += host_seconds
        self._device_seconds += result.device_seconds
        self.history.append(
            StepRecord(step, num_requests, num_tokens, num_decodes, host_seconds, result.device_seconds)
        )
        self._emit(outputs, num_tokens)
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
        self._send(StepOutputs(outputs, stats))
