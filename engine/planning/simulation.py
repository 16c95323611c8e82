"""The real scheduler under a virtual clock: what a load would meet on a card, without the card."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..link.plan import StepPlan, StepResult
from ..link.sampling_params import SamplingParams
from ..options.scheduler_config import SchedulerConfig
from ..schedule.request import Request
from ..schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a load."""

    arrival: float  # seconds
    num_prompt: int
    num_output: int
    prefix: int = 0  # of its prompt, how many tokens others of its group have too
    group: int = 0


@dataclass(slots=True)
class Answer:
    ask: Ask
    sent: float  # seconds; later than its arrival where a client waits for others
    first: float = 0.0
    last: float = 0.0
    engine: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.ask.num_output - 1)


class Clock(Protocol):
    """Of one stage of an engine: see step_model.py."""

    def seconds(self, plan: StepPlan, shared: int = 0) -> float: ...

    def handing_seconds(self, tokens: int) -> float: ...


@dataclass
class Engine:
    """One scheduler and the clocks of its stages, which compute as many plans at once."""

    scheduler: Scheduler
    stages: Sequence[Clock]
    index: int = 0
    acceptance: tuple[float, ...] = ()  # how often the drafts up to each hold; (): nobody drafts
    luck: random.Random = field(default_factory=lambda: random.Random(0))
    plans: deque[tuple[StepPlan, float]] = field(default_factory=deque)  # under way, and when each ends
    open: dict[int, Answer] = field(default_factory=dict)
    rows: dict[int, Ask] = field(default_factory=dict)  # who computes on which row
    free: list[float] = field(init=False)  # when each stage has computed all that it knows of
    known: dict[int, float] = field(default_factory=dict)  # row → when its newest token is there

    def __post_init__(self) -> None:
        self.free = [0.0] * len(self.stages)

    @property
    def ends(self) -> float:
        """Of the oldest plan."""
        return self.plans[0][1]

    def begin(self, now: float) -> None:
        """Plans steps, where there is something to compute and as many as may be are not under way."""
        while len(self.plans) < self.scheduler.config.depth and self.scheduler.has_unfinished():
            if (plan := self.scheduler.schedule()) is None:
                return
            self.plans.append((plan, self._end(plan, now)))

    def _end(self, plan: StepPlan, now: float) -> float:
        """Stages take plans in their order. A stage begins when it has what the one before it made, and the first one
        when the tokens are there that earlier plans sample."""
        shared, tokens = self._shared(plan), plan.total_tokens
        time = max(now, *(self.known.get(row, 0.0) for row in plan.rows)) if plan.rows else now
        for index, stage in enumerate(self.stages):
            time = max(time, self.free[index])
            time = self.free[index] = time + stage.seconds(plan, shared)
            if index < len(self.stages) - 1:
                time += stage.handing_seconds(tokens)
        if len(self.stages) > 1:
            for index in plan.sampled:
                self.known[plan.rows[index]] = time
        return time

    def _shared(self, plan: StepPlan) -> int:
        """Tokens of context that several who decode have, counted for each but one of them."""
        for new in plan.new_rows:
            self.rows[new.row] = self.open[new.request_id].ask
        groups: set[int] = set()
        shared = 0
        for row in plan.rows[: plan.num_decodes]:
            ask = self.rows[row]
            if ask.prefix:
                shared += ask.prefix if ask.group in groups else 0
                groups.add(ask.group)
        return shared

    def end(self) -> list[Answer]:
        """Takes in the oldest step under way. Returns the answers that are over."""
        plan, ended = self.plans.popleft()
        over = []
        for output in self.scheduler.update(self._result(plan)):
            answer = self.open[output.id]
            if output.token_ids:
                answer.first = answer.first or ended
                answer.last = ended
            if output.finish_reason is not None:
                del self.open[output.id]
                over.append(answer)
        return over

    def _result(self, plan: StepPlan) -> StepResult:
        """With drafts for every request, of which as many hold as chance will have."""
        if not self.acceptance:
            return StepResult(plan.step, [1] * len(plan.sampled))
        counts = [1] * len(plan.sampled)
        for index in range(plan.num_decodes if plan.num_drafts else 0):
            drawn = self.luck.random()
            counts[index] += sum(drawn < rate for rate in self.acceptance[: plan.num_drafts])
        drafted = [plan.num_drafts] * plan.num_decodes
        return StepResult(plan.step, [1] * sum(counts), counts=counts, drafted=drafted, num_proposed=len(counts))


class Simulation:
    """Engines alike, behind one address: a request goes to the one with the fewest open, as long as prefixes do not
    matter."""

    def __init__(
        self, config: SchedulerConfig, stages: Sequence[Clock], num_engines: int = 1,
        acceptance: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        self.engines = [Engine(Scheduler(config), stages, index, acceptance) for index in range(num_engines)]
        self._next_id = 0
        self._seed = 0

    def run(self, asks: Iterable[Ask], concurrency: int = 0) -> list[Answer]:
        """All answers, in the order of their ends. `concurrency`: at most so many at once; each next one is sent when
        one is over. 0: as they arrive."""
        waiting = deque(sorted(asks, key=lambda ask: ask.arrival))
        answers: list[Answer] = []
        now, num_open = 0.0, 0
        while waiting or num_open:
            while waiting and waiting[0].arrival <= now and (not concurrency or num_open < concurrency):
                self._send(waiting.popleft(), now)
                num_open += 1
            for engine in self.engines:
                engine.begin(now)
            busy = [(engine.ends, engine.index) for engine in self.engines if engine.plans]
            may_send = waiting and (not concurrency or num_open < concurrency)
            if not busy:
                assert may_send, "requests are open, but no engine has anything to compute"
                now = max(now, waiting[0].arrival)
                continue
            ends, index = min(busy)
            if may_send and waiting[0].arrival < ends:
                now = waiting[0].arrival
                continue
            now = ends
            over = self.engines[index].end()
            num_open -= len(over)
            answers += over
        return answers

    @property
    def num_preemptions(self) -> int:
        return sum(engine.scheduler.planner.num_preemptions for engine in self.engines)

    def _send(self, ask: Ask, now: float) -> None:
        engine = min(self.engines, key=lambda engine: len(engine.open))
        self._next_id += 1
        sampling = SamplingParams(max_tokens=ask.num_output, ignore_eos=True)
        engine.open[self._next_id] = Answer(ask, now, engine=engine.index)
        engine.scheduler.add(Request(self._next_id, self._prompt(ask), sampling))

    def _prompt(self, ask: Ask) -> Sequence[int]:
        """Ids that no other prompt has, but for the prefix of its group."""
        self._seed += 1
        own = array("i", (self._seed & 0x3FFFFFFF,)) * (ask.num_prompt - ask.prefix)
        return array("i", (-1 - ask.group,)) * ask.prefix + own
