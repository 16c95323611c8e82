"""What an engine, or several alike, would make of a load."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ConfigError
from .setup import Setup
from .simulation import Answer, Ask, Simulation

FRONT = 3.4e-3  # seconds from the client to the engine and back to its first token, beside the engine
SHARE = 0.95  # of requests that have to meet what is wanted


@dataclass(frozen=True)
class Wanted:
    """Seconds that SHARE of the requests must not exceed; None: any."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, result: Result) -> bool:
        return (self.ttft is None or result.ttft(SHARE) <= self.ttft) and (
            self.tpot is None or result.tpot(SHARE) <= self.tpot
        )


@dataclass(frozen=True)
class Result:
    """Of one simulated load."""

    rate: float  # requests a second that came in
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
    def keeps_up(self) -> bool:
        """Whether answers end as fast as requests come."""
        seconds = self.answers[-1].sent - self.answers[0].sent
        asked = sum(answer.ask.num_output for answer in self.answers)
        return not self.rate or self.output_rate * seconds >= 0.85 * asked


def steady(
    setup: Setup, rate: float, num_prompt: int, num_output: int, replicas: int = 1, seconds: float = 0
) -> Result:
    """Requests that arrive at random (Poisson), of one size, for so long (0: what shows a queue that grows), the first
    fifth of them not counted."""
    alone = num_output * setup.seconds_alone()
    count = round(min(4000 * replicas, max(100 * replicas, rate * (seconds or max(20.0, 6 * alone)))))
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


def knee(setup: Setup, wanted: Wanted, num_prompt: int, num_output: int, replicas: int = 1) -> Result | None:
    """The highest rate of requests that meets what is wanted, to 3 %; None: none does."""

    def asked(rate: float) -> Result:
        return steady(setup, rate, num_prompt, num_output, replicas)

    if not wanted.met(alone(setup, num_prompt, num_output)):
        return None
    low = high = None
    rate = 0.5 * replicas * likely_rate(setup, num_prompt, num_output)
    # Who asks for little only, time a token for instance, is served at any rate while a queue grows: the load has to be
    # worked off as well.
    while low is None or high is None or high.rate > 1.03 * low.rate:
        result = asked(rate)
        if wanted.met(result) and result.keeps_up:
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
