"""What an engine, or several alike, would make of a load."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..describe.divide import is_cut_into, sizes
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..options.config import EngineConfig
from .card import HOST_CARDS
from .setup import Setup
from .simulation import Answer, Ask, Simulation

FRONT = 3.4e-3  # seconds from the client to the engine and back to its first token, beside the engine
SHARE = 0.95  # of requests that have to meet what is wanted
KEPT = 0.85  # of what is asked for, that at least ends in the same time where no queue grows
SEEN = 20.0  # seconds of a load, or as long as six of its requests take: in less a queue does not show


@dataclass(frozen=True)
class Wanted:
    """Seconds that SHARE of the requests must not exceed; None: any."""

    ttft: float | None = None
    tpot: float | None = None

    @property
    def has_target(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def met(self, result: Result) -> bool:
        return (self.ttft is None or result.ttft(SHARE) <= self.ttft) and (
            self.tpot is None or result.tpot(SHARE) <= self.tpot
        )

    def held(self, result: Result) -> bool:
        """Met, and no queue is seen to grow: who asks for little only, time a token for instance, is served at any rate
        while one does."""
        return self.met(result) and result.keeps_up is not False


@dataclass(frozen=True)
class Result:
    """Of one simulated load."""

    rate: float  # requests a second that came in; 0: as a trace has them
    answers: Sequence[Answer]  # those that count, by the time they were sent
    num_preemptions: int
    ends: Sequence[tuple[float, int]] = ()  # of all: when, and how many tokens they had

    def ttft(self, share: float) -> float:
        return FRONT + _percentile([answer.ttft for answer in self.answers], share)

    def tpot(self, share: float) -> float:
        return _percentile([answer.tpot for answer in self.answers], share)

    @property
    def seconds(self) -> float:
        return max(answer.last for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def output_rate(self) -> float:
        """Tokens a second, of answers that ended while requests came in; where all came at once, of all."""
        start, end = self.answers[0].sent, self.answers[-1].sent
        if not self.rate:
            return sum(answer.ask.num_output for answer in self.answers) / self.seconds
        return sum(tokens for time, tokens in self.ends if start <= time <= end) / (end - start)

    @property
    def keeps_up(self) -> bool | None:
        """Whether answers end as fast as requests come; None: the load does not show it."""
        if not self.rate:
            return self._trace_keeps_up()
        seconds = self.answers[-1].sent - self.answers[0].sent
        asked = sum(answer.ask.num_output for answer in self.answers)
        return self.output_rate * seconds >= KEPT * asked

    def _trace_keeps_up(self) -> bool | None:
        """By how much later than so many requests so many answers are over: at the end of the trace, at its beginning
        and half-way. A trace may have bursts: what has been worked off by its end did not grow."""
        sent = [answer.sent for answer in self.answers]
        seconds = sent[-1] - sent[0]
        if seconds < SEEN:
            return None
        early, half, late = (min(len(sent) - 1, int(share * len(sent))) for share in (1 - SHARE, 0.5, SHARE))
        came = sent[late] - sent[half]  # the seconds in which those did that lags are compared of

        def lags(times: Iterable[float]) -> list[float]:
            return [time - start for time, start in zip(sorted(times), sent, strict=True)]

        def grow(lags: list[float]) -> bool:
            return lags[late] - lags[half] > (1 - KEPT) * came

        ends = lags(answer.last for answer in self.answers)
        if ends[late] - ends[early] <= (1 - KEPT) * seconds:
            return True
        if came < (1 - KEPT) * seconds:  # a burst, of which the trace ends before it can have been worked off
            return None
        # Of answers that take about as long as the trace more and more are open until its end, whatever the load; not
        # of requests that wait for their first token.
        is_long = seconds < 6 * _percentile([answer.last - answer.first for answer in self.answers], 0.5)
        waits = lags(answer.first for answer in self.answers)
        return False if grow(waits) or (grow(ends) and not is_long) else None


def steady(
    setup: Setup, rate: float, num_prompt: int, num_output: int, replicas: int = 1, seconds: float = 0
) -> Result:
    """Requests that arrive at random (Poisson), of one size, for so long (0: what shows a queue that grows), the first
    fifth of them not counted."""
    alone = num_output * setup.seconds_alone()
    count = round(min(4000 * replicas, max(100 * replicas, rate * (seconds or max(SEEN, 6 * alone)))))
    source, now, asks = random.Random(0), 0.0, []
    for _ in range(count):
        asks.append(Ask(now, num_prompt, num_output))
        now += source.expovariate(rate)
    return replay(setup, asks, replicas, rate, skip=count // 5)


def replay(setup: Setup, asks: Sequence[Ask], replicas: int = 1, rate: float = 0.0, skip: int = 0) -> Result:
    """A load as it came. Raises ConfigError for a request that no engine here takes."""
    limit = setup.scheduler.max_model_len
    for ask in asks:
        if ask.num_prompt + ask.num_output > limit:
            raise ConfigError(
                f"a request has {ask.num_prompt} + {ask.num_output} tokens: at most {limit} fit; shorten it, or raise "
                "--max-model-len"
            )
    config = setup.scheduler
    if not any(ask.prefix for ask in asks):
        config = dataclasses.replace(config, enable_prefix_caching=False)  # nothing is found: hashing is saved
    simulation = Simulation(config, setup.stages, replicas, setup.acceptance)
    answers = sorted(simulation.run(asks), key=lambda answer: answer.sent)
    ends = [(answer.last, answer.ask.num_output) for answer in answers]
    return Result(rate, answers[skip:], simulation.num_preemptions, ends)


def alone(setup: Setup, num_prompt: int, num_output: int) -> Result:
    """Of one request."""
    return replay(setup, [Ask(0.0, num_prompt, num_output)])


def likely_rate(setup: Setup, num_prompt: int, num_output: int) -> float:
    """Requests a second that an engine works off, about: by the products of its slowest stage alone, for prompts in
    chunks and answers of whom 64 decode at a time."""
    chunk = min(num_prompt, setup.scheduler.max_mixed_tokens or setup.scheduler.max_num_batched_tokens)
    return 1 / max(
        stage.product_seconds(chunk, 1) * num_prompt / chunk + stage.product_seconds(64, 64) * num_output / 64
        for stage in setup.stages
    )


def likely_engines(setup: Setup, asks: Sequence[Ask], wanted: Wanted) -> int:
    """That a trace needs, about: for its work, in the time until its last request has to be answered."""
    num_prompt = sum(ask.num_prompt for ask in asks) // len(asks)
    num_output = sum(ask.num_output for ask in asks) // len(asks)
    arrivals = [ask.arrival for ask in asks]
    seconds = max(arrivals) - min(arrivals) + (wanted.ttft or 0) + num_output * (wanted.tpot or setup.seconds_alone())
    return max(1, int(len(asks) / likely_rate(setup, num_prompt, num_output) / seconds))


def knee(setup: Setup, wanted: Wanted, num_prompt: int, num_output: int, replicas: int = 1) -> Result | None:
    """The highest rate of requests that meets what is wanted, to 3 %; None: none does."""

    def asked(rate: float) -> Result:
        return steady(setup, rate, num_prompt, num_output, replicas)

    if not wanted.met(alone(setup, num_prompt, num_output)):
        return None
    low = high = None
    rate = 0.5 * replicas * likely_rate(setup, num_prompt, num_output)
    while low is None or high is None or high.rate > 1.03 * low.rate:
        result = asked(rate)
        if wanted.held(result):
            low = result
            rate = rate * 2 if high is None else (low.rate + high.rate) / 2
        else:
            high = result
            rate = rate / 2 if low is None else (low.rate + high.rate) / 2
        if rate < 0.005 * replicas:
            return None
    return low


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


MOST_ENGINES = 64  # that a server may have


@dataclass(frozen=True)
class Fleet:
    """So many engines alike, and what a load meets there."""

    setup: Setup
    replicas: int
    result: Result

    @property
    def cards(self) -> int:
        return self.setup.cards * self.replicas


def divisions(model: ModelConfig, config: EngineConfig) -> list[EngineConfig]:
    """The same on one card, and divided in each way that the model can be over the cards of one host: the fewest cards
    first, then the fewest stages."""
    whole = dataclasses.replace(config, tensor_parallel_size=1, pipeline_parallel_size=1)
    stages = [count for count in range(1, HOST_CARDS + 1) if is_cut_into(model, count)]
    pairs = [
        (ranks, count)
        for ranks in sizes(model, config.enable_expert_parallel)
        for count in stages
        if ranks * count <= HOST_CARDS
    ]
    return [
        dataclasses.replace(whole, tensor_parallel_size=ranks, pipeline_parallel_size=count)
        for ranks, count in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))
    ]


def fitting(configs: Iterable[EngineConfig], make: Callable[[EngineConfig], Setup]) -> list[Setup]:
    """Those that the cards' memory holds, of stages no more than that takes: more would bring an engine less than as
    many engines. Raises ConfigError, that of the last one, where there is none."""
    found: list[Setup] = []
    refused = ConfigError("nothing was asked for")
    for config in configs:
        if any(setup.ranks == config.tensor_parallel_size for setup in found):
            continue
        try:
            found.append(make(config))
        except ConfigError as error:
            refused = error
    if not found:
        raise refused
    return found


def fewest(
    setups: Sequence[Setup], wanted: Wanted, ask: Callable[[Setup, int], Result], guess: Callable[[Setup], int],
    most: int = MOST_ENGINES,
) -> tuple[Fleet | None, list[Fleet]]:  # fmt: skip
    """→ the fewest cards that meet what is wanted, of as many those with the least divided engines; all that were
    asked. setups: in the order of `divisions`; guess: engines that are likely to be needed; 0: no number is enough;
    `most`: engines that are asked, where more are likely to be needed none is."""
    best: Fleet | None = None
    asked: list[Fleet] = []

    def meets(setup: Setup, replicas: int) -> bool:
        nonlocal best
        result = ask(setup, replicas)
        asked.append(Fleet(setup, replicas, result))
        if met := wanted.held(result):
            best = asked[-1]
        return met

    for setup in setups:
        start = len(asked)
        if best is not None:
            below = min(most, (best.cards - 1) // setup.cards)
            _find_least(partial(meets, setup), below, below)
        elif 0 < (likely := guess(setup)) <= most:
            _find_least(partial(meets, setup), likely, most)
        asked[start:] = sorted(asked[start:], key=lambda fleet: fleet.replicas)
    return best, asked


def _find_least(meets: Callable[[int], bool], first: int, most: int) -> None:
    """Asks until it is known which of 1 to `most` is the least that meets: the last one that did. From `first` on in
    steps that double, then in halves of what is left, for a number that meets is taken to have none above it that does
    not. Nothing is asked twice."""
    too_few, enough = 0, most + 1
    count, step = first, 1
    while enough - too_few > 1:
        if meets(count):
            enough = count
        else:
            too_few = count
        if enough > most:
            count = min(most, too_few + step)
        elif too_few == 0:
            count = max(1, enough - step)
        else:
            count = (too_few + enough) // 2
        step *= 2
