"""The real scheduler before stages under a virtual clock: how long do they idle, and how even are chunks?"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from vserve.engine.cache.kv_format import NUMBERS
from vserve.engine.describe.divide import context_cost, stage_layers
from vserve.engine.describe.reading import parse_model_config
from vserve.engine.link.plan import StepPlan, StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.parallel.pipeline import Stage
from vserve.engine.planning.card import CARDS
from vserve.engine.planning.shape import kept_weights, shape_of
from vserve.engine.planning.step_model import StepModel
from vserve.engine.schedule import planner
from vserve.engine.schedule.request import Request
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.schedule.sharing import equal_chunk, whose_turn

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "torch_dtype": "bfloat16",
}  # fmt: skip
HOST = 0.5e-3  # seconds from a result to the launch that follows


@dataclass
class Clock:
    """Stages that take in the scheduler's plans one after the other."""

    models: list[StepModel]
    config: SchedulerConfig
    busy: list[float] = field(default_factory=list)
    plans: list[tuple[StepPlan, list[float]]] = field(default_factory=list)
    now: float = 0.0

    def run(self, requests: list[Request], concurrency: int) -> float:
        """Until they are through. → the idle share of the stages, from the first plan's end to the last one's start."""
        scheduler, stages = Scheduler(self.config), len(self.models)
        free = [0.0] * stages
        self.busy = [0.0] * stages
        waiting, running = deque(requests), 0
        in_flight: deque[tuple[StepPlan, float]] = deque()
        sampled: dict[int, float] = {}  # row → when its newest token is there
        begun, spans = 0.0, []
        while waiting or scheduler.has_unfinished():
            while waiting and running < concurrency:
                scheduler.add(waiting.popleft())
                running += 1
            while len(in_flight) < self.config.depth and (plan := scheduler.schedule()) is not None:
                known = [sampled.get(row, 0.0) for row in plan.rows]
                start, took = max(self.now, *known), []
                for stage, model in enumerate(self.models):
                    start = max(start, free[stage])
                    took.append(model.seconds(plan))
                    spans.append((stage, start, start + took[-1]))
                    start = free[stage] = start + took[-1]
                for index in plan.sampled:
                    sampled[plan.rows[index]] = start
                self.plans.append((plan, took))
                in_flight.append((plan, start))
            plan, end = in_flight.popleft()
            self.now = max(self.now, end) + HOST
            begun = begun or end
            outputs = scheduler.update(StepResult(plan.step, [1] * len(plan.sampled)))
            running -= sum(output.finish_reason is not None for output in outputs)
        last = self.plans[-1][1][0]
        until = free[0] - last
        for stage, start, end in spans:
            self.busy[stage] += max(0.0, min(end, until) - max(start, begun))
        return 1 - sum(self.busy) / (stages * (until - begun))


def clock(num_stages: int, **options: Any) -> Clock:
    model = parse_model_config(LLAMA_70B)
    parts = stage_layers(model, num_stages)
    weights = kept_weights(model, model.dtype)
    stages = [Stage(index, num_stages, part) for index, part in enumerate(parts)]
    models = [StepModel(shape_of(model, weights, NUMBERS, stage=stage), CARDS["h200"]) for stage in stages]
    values = {
        "max_model_len": 16384, "max_num_batched_tokens": max(1024, 8192 // num_stages), "max_num_seqs": 256,
        "max_mixed_tokens": 1024, "num_blocks": 60_000, "depth": num_stages + 1, "pipeline_parallel_size": num_stages,
        "context_cost": context_cost(model), "enable_prefix_caching": False,
    }  # fmt: skip
    return Clock(models, SchedulerConfig(**(values | options)))


def requests(count: int, num_prompt: int, num_output: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return [Request(id, array("i", [id + 3]) * num_prompt, sampling) for id in range(count)]


@pytest.mark.parametrize(
    ("num_stages", "prompt", "output", "limit"), [(2, 8000, 128, 0.06), (4, 8000, 128, 0.08), (2, 100, 256, 0.06)]
)
def test_stages_seldom_idle_with_64_streams(num_stages: int, prompt: int, output: int, limit: float) -> None:
    idle = clock(num_stages).run(requests(128, prompt, output), 64)
    print(f"{num_stages} stages, 64 streams of {prompt}/{output}: idle {idle:.1%}")
    assert idle < limit


def test_stages_idle_where_one_plan_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What turns are for: else all but one stage wait."""
    monkeypatch.setattr(planner, "whose_turn", lambda decodes, *_: decodes)
    idle = clock(2).run(requests(64, 100, 128), 64)
    print(f"all decodes in one plan: idle {idle:.1%}")
    assert idle > 0.4


def test_one_alone_waits_on_the_device() -> None:
    """With drafts, too: it may be in one plan more than the one in flight, and no further."""
    (alone,) = requests(1, 10, 20)
    alone.last_sampled = 1
    for drafts in (0, 3):
        alone.num_in_flight_tokens, alone.num_in_flight_drafts = 1 + drafts, drafts
        assert whose_turn([alone], 2, 3, False) == [alone] and not whose_turn([alone], 2, 3, True)
        alone.num_in_flight_tokens, alone.num_in_flight_drafts = 2 * (1 + drafts), 2 * drafts
        assert not whose_turn([alone], 2, 3, False)


def test_chunks_of_a_long_prompt_take_about_as_long() -> None:
    even = clock(4, max_model_len=1 << 17, context_cost=context_cost(parse_model_config(LLAMA_70B)))
    idle = even.run(requests(1, 100_000, 1), 1)
    seconds = [took[1] for plan, took in even.plans[:-2] if plan.total_tokens > 64]
    alike = clock(4, max_model_len=1 << 17, context_cost=0.0)
    worse = alike.run(requests(1, 100_000, 1), 1)
    uneven = [took[1] for plan, took in alike.plans[:-2] if plan.total_tokens > 64]
    print(f"chunks {max(seconds) / min(seconds):.2f} and {max(uneven) / min(uneven):.2f}, idle {idle:.1%}, {worse:.1%}")
    assert max(seconds) / min(seconds) < 1.2 and max(uneven) / min(uneven) > 3


def test_equal_chunks() -> None:
    assert equal_chunk(4096, 0, 1e-9, 16) == 4096
    assert equal_chunk(0, 500, 1e-4, 16) == 0 and equal_chunk(5, 100_000, 1e-3, 16) == 1
    sizes = [equal_chunk(4096, computed, 4e-5, 16) for computed in range(0, 100_000, 5000)]
    assert sizes == sorted(sizes, reverse=True) and all(size % 16 == 0 for size in sizes)
    for computed, size in zip(range(0, 100_000, 5000), sizes, strict=True):
        cost, first = size * (1 + 4e-5 * (computed + size / 2)), 4096 * (1 + 4e-5 * 2048)
        assert 0.97 * first <= cost <= first * 1.0001
