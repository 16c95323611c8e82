"""The engine loop: inbox → schedule → launch → take the oldest result → outbox. It alone drives the scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec

from ..adapters.layout import AdapterStore
from ..adapters.loading import AdapterLoading, Others
from ..link.messages import (
    HISTORY,
    AbortRequests,
    AdapterLoaded,
    AddRequest,
    DropAdapter,
    EngineStats,
    FromEngine,
    LastSteps,
    LoadAdapter,
    ReadSteps,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepRecord,
    StepReport,
    ToEngine,
    WatchSteps,
)
from ..link.plan import ADAPTER_UNUSABLE, StepResult
from ..options.scheduler_config import SchedulerConfig
from ..schedule.kv_events import KVEvents, Publisher
from ..schedule.pacing import Kind, Pacer
from ..schedule.scheduler import Scheduler
from ..schedule.watch import StepWatch
from ..step.executor import Executor
from ..step.mask import MaskThreads, Patience, bound, guides, make_mask
from .arrivals import Arrivals

logger = logging.getLogger(__name__)

SHORTEST_WAIT = 0.3e-3  # seconds; below, waiting costs more than it gives
TIMER_PRECISION = 1.5e-3  # of the event loop
TURN = 2e-3  # seconds of taking in what has arrived, then steps have their turn: about what fills one


@dataclass(slots=True)
class InFlight:
    """What is remembered of a plan until its result is in."""

    record: StepRecord
    kind: Kind
    watched: list[tuple[int, int, bool]] | None  # StepWatch.rows, where somebody watches


class EngineLoop:
    def __init__(
        self, config: SchedulerConfig, executor: Executor, send: Callable[[FromEngine], None], *, vocab_size: int,
        seed: int = 0, shares_thread: bool = False, adapters: AdapterStore | None = None,
        other_adapters: Others | None = None,
    ) -> None:  # fmt: skip
        """`shares_thread`: the event loop is not the engine's own, so nothing may block it. `other_adapters`: the
        stores of other ranks."""
        self.config = config
        self.scheduler = Scheduler(config)
        self.executor = executor
        self._shares_thread = shares_thread
        self.history: deque[StepRecord] = deque(maxlen=HISTORY)
        self._send = send
        self._vocab_size = vocab_size
        self._arrivals = Arrivals(self.scheduler, self._vocab_size, seed, self._resumed)
        self.adapters: AdapterLoading | None = None
        if adapters is not None and (book := self.scheduler.adapters) is not None:
            self.adapters = AdapterLoading(adapters, book, send, self._adapter_failed, self._awaken, other_adapters)
            self._arrivals.adapters = self.adapters
        self._inbox: deque[ToEngine] = deque()
        self._adding: Iterator[list[RequestOutput]] = iter(())  # the requests of a message, and what ended on arrival
        self._is_behind = False  # the turn was over before the inbox was empty
        self._wake = asyncio.Event()
        self.masks = MaskThreads(self._wake.set)
        self._patience = Patience()
        self._plans: deque[InFlight] = deque()
        self._pacer = Pacer()
        self._unsampled = False  # the newest of them waits for its mask, and that for the results of the others
        self._num_graph_misses = self._num_late_compilations = 0  # as the last result has them
        self._expert_tokens: tuple[int, ...] = ()
        self._expert_imbalance = 0.0
        self._num_violations = 0  # of what should hold at rest
        self._host_seconds = 0.0
        self._device_seconds = 0.0
        self._watch: StepWatch | None = None  # where somebody watches
        self._events: KVEvents | None = None  # where somebody wants to know what is cached

    def publish(self, publisher: Publisher) -> None:
        """From now on what the prefix cache gains and loses."""
        names = {} if self.scheduler.adapters is None else self.scheduler.adapters.names
        self._events = KVEvents(publisher.publish, self.config.block_size, self.config.windows, names)
        self.scheduler.kv.publish(self._events)
        self._events.flush()

    def submit(self, message: ToEngine) -> None:
        """Called on the loop's thread. The next step sees it, unless there is more than can be taken in by then."""
        self._inbox.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Until a Shutdown message; raises when the device is lost."""
        while True:
            if not self._drain_inbox():
                return
            if await self._hold_back() and not self._drain_inbox():
                return
            await self._launch()
            if self._plans:
                oldest = asyncio.ensure_future(self.executor.result())
                if not await self._drain_inbox_until(oldest):
                    return
                self._finish_oldest(oldest)
            else:
                self._wake.clear()
                if self._watch is not None:
                    self._watch.rest()
                await self._news()

    async def _hold_back(self) -> bool:
        """With one step in flight and nobody waiting, the next is launched late: who arrives by then is in it.

        Returns whether time has passed.
        """
        if len(self._plans) != 1 or self.config.depth == 1 or self._unsampled or self.scheduler.roster.waiting:
            return False
        if self.config.pipeline_parallel_size > 1:
            return False  # the first stage idles already
        if self._is_behind or self._inbox:
            return False  # there is something to take in meanwhile
        until = time.perf_counter() + self._pacer.slack(time.perf_counter())
        left = until - time.perf_counter()
        if left < SHORTEST_WAIT:
            return False
        if left > TIMER_PRECISION and await self.executor.wait(left - TIMER_PRECISION):
            return True
        if not self._shares_thread and (left := until - time.perf_counter()) > 0:
            time.sleep(left)  # the event loop's timers are no finer than a millisecond
        await asyncio.sleep(0)  # reads what has arrived
        return True

    async def _drain_inbox_until(self, result: asyncio.Future[StepResult]) -> bool:
        """What arrives during a step is taken in at once: hundreds of prompts would make the next launch late."""
        result.add_done_callback(lambda _: self._wake.set())
        while not result.done():
            self._wake.clear()
            await self._news()
            if not self._drain_inbox():
                return False
        return True

    async def _news(self) -> None:
        """Waits until there is something to take in."""
        if self._is_behind or self._inbox:
            await asyncio.sleep(0)  # a result or an abort may have come, and the heart has to beat
        else:
            await self._wake.wait()

    def _drain_inbox(self) -> bool:
        """For a turn: whoever sends very much must not keep the others from their next tokens. False: leave."""
        outputs: list[RequestOutput] = []
        until = time.perf_counter() + TURN
        while not (is_behind := time.perf_counter() >= until):
            if (ended := next(self._adding, None)) is not None:
                outputs += ended
                continue
            if not self._inbox:
                break
            message = self._inbox.popleft()
            if isinstance(message, AddRequest):
                self._adding = self._arrivals.add(message)
            elif isinstance(message, AbortRequests):
                outputs += self._arrivals.abort(message)
            elif isinstance(message, Shutdown):
                return False
            elif isinstance(message, LoadAdapter | DropAdapter):
                self._change_adapters(message)
            elif isinstance(message, WatchSteps):
                if not message.on:
                    self._watch = None
                elif self._watch is not None:
                    self._watch.greet()
                else:
                    self._watch = StepWatch(self.scheduler.kv, self._send)
            elif isinstance(message, ReadSteps):
                first = max(0, len(self.history) - message.count)
                self._send(LastSteps(message.id, list(islice(self.history, first, None))))
            else:
                self._arrivals.change_grammars(message)
        self._is_behind = is_behind
        if outputs:
            self._emit(outputs, 0)
        return True

    def _change_adapters(self, message: LoadAdapter | DropAdapter) -> None:
        if self.adapters is None:
            if isinstance(message, LoadAdapter):
                self._send(AdapterLoaded(message.id, error="adapters are off: --enable-lora turns them on"))
        elif isinstance(message, LoadAdapter):
            self.adapters.load(message)
        else:
            self._adapter_failed(message.id)  # nobody should be left who has it
            self.adapters.drop(message)

    def _adapter_failed(self, id: int) -> None:
        ended = self.scheduler.reject_adapter(id, ADAPTER_UNUSABLE)
        if ended:
            self._emit(ended, 0)

    def _awaken(self) -> None:
        self._wake.set()

    def _resumed(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._emit(outputs, 0)
        self._wake.set()

    async def _launch(self) -> None:
        """Steps until `depth` are in flight, or until one has to wait for its mask."""
        if self._unsampled and len(self._plans) == 1:
            await self._sample_constrained()
        while len(self._plans) < self.config.depth and not self._unsampled:
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            if self.adapters is not None:
                self.adapters.fetch()
            if plan is None:
                return
            constrained = self.scheduler.in_flight[-1].constrained
            if self.scheduler.roster.num_constrained and plan.new_rows:
                for guide in guides(list(self.scheduler.in_flight[-1].admitted)):
                    if guide.binds(0):  # the first mask of a grammar is the longest one: it is made while prompts run
                        self.masks.begin(guide)
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
            record = StepRecord(plan.step, 0.0, len(plan.rows), plan.total_tokens, plan.num_decodes, spent)
            self._plans.append(InFlight(record, self._pacer.kind(plan), watched))
            if constrained:
                self._unsampled = True
                if len(self._plans) == 1:
                    await self._sample_constrained()

    async def _sample_constrained(self) -> None:
        """The results of all earlier steps are in: the grammars know every token before those to be sampled. Rows whose
        masks take too long sit out, so that the others can go on."""
        self._unsampled = False
        step = self.scheduler.in_flight[-1]
        needed = [guide for _, _, _, guide in bound(step)]
        for guide in needed:
            self.masks.begin(guide)
        started = time.perf_counter()
        others = len(needed) < len(step.scheduled)
        await self.masks.settle(needed, self._patience.left(), others)
        waited, started = time.perf_counter() - started, time.perf_counter()
        if others or len(needed) > 1:
            self._patience.spend(waited)
        mask, errors, postponed = make_mask(step, self._vocab_size)
        self.scheduler.postpone(postponed)
        if errors:
            self._emit([self.scheduler.reject(request, error) for request, error in errors], 0)
        try:
            self.executor.sample(mask)
        except Exception as error:
            self._fail(self._plans.pop().record.step, error)
            return
        self._plans[-1].record.host_seconds += time.perf_counter() - started

    def _finish_oldest(self, oldest: asyncio.Future[StepResult]) -> None:
        plan = self._plans.popleft()
        record = plan.record
        try:
            result = oldest.result()
        except Exception as error:
            self._fail(record.step, error)
            return
        started = time.perf_counter()
        self._pacer.finished(plan.kind, result.device_seconds, started)
        self._num_graph_misses, self._num_late_compilations = result.num_graph_misses, result.num_late_compilations
        if result.expert_tokens:
            self._expert_tokens, self._expert_imbalance = result.expert_tokens, result.expert_imbalance
        sampled = self.scheduler.in_flight[0].sampled
        outputs = self.scheduler.update(result)
        if self.scheduler.roster.num_constrained:
            for guide in guides(sampled):
                if guide.slow and guide.binds(0):  # it is in no step until its mask is there
                    self.masks.begin(guide)
        record.time, record.device_seconds = time.time(), result.device_seconds
        record.host_seconds += time.perf_counter() - started
        self._host_seconds += record.host_seconds
        self._device_seconds += result.device_seconds
        self.history.append(record)
        self._emit(outputs, record.num_tokens)
        if self._events is not None:
            self._events.flush()
        if self._watch is not None and plan.watched is not None:
            self._watch.add(StepReport(record, plan.watched), time.monotonic())
        if not self.scheduler.has_unfinished() and not self._plans:
            self._check_books()

    def _check_books(self) -> None:
        """At rest. Whoever comes next is served as well as may be: what does not balance is for a human to look at."""
        try:
            self.scheduler.check_invariants()
        except Exception as error:
            self._num_violations = count = self._num_violations + 1
            if count & (count - 1) == 0:
                logger.error(
                    "the engine's books do not balance (seen %d times): %s. This is a defect of vserve: please report "
                    "it; restart vserve when it is convenient", count, error, exc_info=error,
                )  # fmt: skip

    def _fail(self, step: int, error: Exception) -> None:
        """Only the step's own requests fail, unless no step can follow."""
        logger.error("step %d failed: %s: %s", step, type(error).__name__, error, exc_info=error)
        self.executor.recover(error)
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        self._emit(self.scheduler.fail(step, message), 0)

    def _emit(self, outputs: list[RequestOutput], step_tokens: int) -> None:
        stats: EngineStats = msgspec.structs.replace(
            self.scheduler.stats(self._device_seconds, self._host_seconds),
            step_tokens=step_tokens,  # 0 where no step is reported: a step must not be counted twice
            num_graph_misses=self._num_graph_misses,
            num_late_compilations=self._num_late_compilations,
            num_invariant_violations=self._num_violations,
            expert_tokens=self._expert_tokens,
            expert_imbalance=self._expert_imbalance,
        )
        planner = self.scheduler.planner
        preempted, planner.preempted = planner.preempted, []
        self._send(StepOutputs(outputs, stats, preempted))
