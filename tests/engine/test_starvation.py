"""Row 33 of the attacks: who waits for whom, and for how long at most; counted in steps, not in seconds."""

from __future__ import annotations

import math

import pytest

from vserve.engine.link.plan import StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.request import Request
from vserve.engine.schedule.scheduler import Scheduler

LONG = 100_000  # tokens of a prompt
STEP, MIXED = 8192, 1024


class Engine:
    """Notes the step of each request's first token."""

    def __init__(self, num_seqs: int = 256) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=LONG + 1000, max_num_batched_tokens=STEP, max_mixed_tokens=MIXED, max_num_seqs=num_seqs,
                block_size=16, num_blocks=20_000, depth=1,
            )
        )  # fmt: skip
        self.num_steps = 0
        self.num_requests = 0
        self.first: dict[int, int] = {}
        self.tokens_of_step: list[set[int]] = []  # ids of the requests that got a token

    def add(self, length: int, max_tokens: int) -> int:
        self.num_requests += 1
        prompt = [self.num_requests] * length  # nobody shares a prefix
        self.scheduler.add(Request(self.num_requests, prompt, SamplingParams(max_tokens=max_tokens)))
        return self.num_requests

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        outputs = self.scheduler.update(StepResult(plan.step, [7] * len(plan.sampled)))
        self.num_steps += 1
        self.tokens_of_step.append({output.id for output in outputs})
        for output in outputs:
            self.first.setdefault(output.id, self.num_steps)


def test_row_33_many_short_requests_wait_for_one_long_prompt_only() -> None:
    engine = Engine()
    long = engine.add(LONG, 10)
    short = [engine.add(100, 10) for _ in range(200)]
    while len(engine.first) < 201:
        engine.step()
    steps_of_long, steps_of_short = math.ceil(LONG / STEP), math.ceil(200 * 100 / (MIXED // 4))
    assert engine.first[long] == steps_of_long
    assert max(engine.first[id] for id in short) <= steps_of_long + steps_of_short
    assert [engine.first[id] for id in short] == sorted(engine.first[id] for id in short)


def test_row_33_running_answers_go_on_beside_a_long_prompt() -> None:
    engine = Engine()
    short = {engine.add(100, 500) for _ in range(200)}
    while len(engine.first) < 200:
        engine.step()
    began = engine.num_steps
    long = engine.add(LONG, 10)
    while long not in engine.first:
        engine.step()
        assert short <= engine.tokens_of_step[-1], "an answer was held up"
    assert engine.num_steps - began <= math.ceil(LONG / (MIXED // 4)) + 1


@pytest.mark.parametrize("num_seqs", [16, 256])
def test_row_33_a_long_prompt_gets_its_turn_however_many_short_ones_come(num_seqs: int) -> None:
    """Ten new requests at every step, which is more than the engine can bear: the queue only grows."""
    engine = Engine(num_seqs)
    ahead = [engine.add(100, 10) for _ in range(200)]
    long = engine.add(LONG, 10)
    while long not in engine.first:
        assert engine.num_steps < 2000, "starved"
        for _ in range(10):
            engine.add(100, 10)
        engine.step()
    rounds = math.ceil(len(ahead) / num_seqs) * (10 + math.ceil(100 * num_seqs / (MIXED // 4)))
    assert engine.num_steps <= rounds + math.ceil(LONG / (MIXED // 4)) + 1
    later = [id for id in engine.first if id > long]
    assert all(engine.first[id] >= engine.first[long] for id in later), "who came later was served first"
