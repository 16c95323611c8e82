"""Embeddings are the pooled hidden states of transformers, whatever the engine does on the way (fp32, CPU)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from vserve.engine.cache.rows import RowTables
from vserve.engine.link.plan import NOT_FINITE, NewRow, StepPlan, StepResult
from vserve.engine.link.sampling_params import CLS, LAST, MEAN, POOLINGS, Pooling, SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.request import Request
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.step.prompt_results import Pooler

TOLERANCE = 1e-4
SHARED = list(range(10, 60))


def pooled(kind: str, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling(kind, **options))


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    lengths = (1, 2, 15, 16, 17, 31, 33, 48, 100, 64)
    return [SHARED[: n // 2] + [rng.randrange(5, 290) for _ in range(n - n // 2)] for n in lengths]


def expected(model: Any, prompt: list[int], pooling: Pooling) -> np.ndarray:
    with torch.inference_mode():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
    vector = {LAST: states[-1], CLS: states[0], MEAN: states.mean(0)}[pooling.kind][: pooling.dimensions]
    return (vector / vector.norm() if pooling.normalize else vector).numpy()


def vector(embedding: bytes | None) -> np.ndarray:
    assert embedding is not None
    return np.frombuffer(embedding, dtype="<f4")


MODELS = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tiny_model: Any, engine: Any) -> tuple[Any, Any]:
    """(an engine, transformers' model without its head)"""
    from transformers import AutoModel

    folder = tiny_model(request.param)
    return type(engine)(folder), AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16},
    "one token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 24},
    "preempted": {"num_gpu_blocks_override": 10, "max_model_len": 112, "max_num_batched_tokens": 32},
}


# Every way of one model, and of each model a way with chunks and a cache: a way knows nothing of the model.
QUICK = [("llama", way) for way in WAYS if way != "one token at a time"] + [(model, "chunked") for model in MODELS[1:]]
CASES = [
    pytest.param(model, way, marks=[] if (model, way) in QUICK else pytest.mark.slow)
    for model in MODELS
    for way in WAYS
]


@pytest.mark.parametrize(("model", "way"), CASES, indirect=["model"])
def test_as_transformers(model: tuple[Any, Any], way: str) -> None:
    """Twice, the second time with a warm prefix cache; beside running generations, whose tokens stay what they are."""
    engine, oracle = model
    asked = [(p, pooled(k, normalize=i % 2 == 0)) for i, p in enumerate(prompts()) for k in POOLINGS]
    texts = [(p[:8], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)) for p in prompts()[2:6]]
    ((*alone,),), _ = engine.run(texts)
    (*waves,), stats = engine.run(texts + asked, asked, **WAYS[way])
    assert [answer.tokens for answer in waves[0][: len(texts)]] == [answer.tokens for answer in alone]
    for answers in (waves[0][len(texts) :], waves[1]):
        for (prompt, sampling), answer in zip(asked, answers, strict=True):
            assert (answer.finish_reason, answer.tokens) == ("stop", [])
            found, wanted = vector(answer.embedding), expected(oracle, prompt, sampling.pooling)
            assert np.abs(found - wanted).max() < TOLERANCE, (len(prompt), sampling.pooling)
    if way == "preempted":
        assert stats.num_preemptions > 0
    cached = {k: sum(a.num_cached_tokens for (_, s), a in zip(asked, waves[1], strict=True) if s.pooling.kind == k)
              for k in POOLINGS}  # fmt: skip
    assert cached[MEAN] == cached[CLS] == 0, "what was not computed cannot be pooled"
    assert (cached[LAST] > 0) == (way != "uncached")


def test_dimensions_and_length(engine: Any) -> None:
    prompt = prompts()[5]
    options = [{"normalize": False}, {}, {"dimensions": 10}, {"dimensions": 1}, {"dimensions": 10, "normalize": False}]
    (answers,), _ = engine.run([(prompt, pooled(MEAN, **o)) for o in options])
    whole, unit, ten, one, raw = (vector(answer.embedding) for answer in answers)
    assert whole.shape == unit.shape == (64,) and ten.shape == (10,)
    assert np.allclose(unit, whole / np.linalg.norm(whole), atol=1e-6)
    assert np.allclose(ten, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-6)
    assert abs(one[0]) == 1 and np.array_equal(raw, whole[:10])


def test_a_prompt_may_fill_the_context(engine: Any) -> None:
    """Nothing follows it. A generation needs room for a token."""
    prompt = [5 + i % 200 for i in range(64)]
    asked = [(prompt, pooled(kind)) for kind in POOLINGS]
    for budget in (64, 21, 1):
        answers = engine.run(asked, max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=1)[0][0]
        assert [answer.finish_reason for answer in answers] == ["stop"] * 3
    too_long = [([*prompt, 5], pooled(LAST)), (prompt, SamplingParams(max_tokens=1))]
    answers = engine.run(too_long, max_model_len=64)[0][0]
    assert [answer.finish_reason for answer in answers] == ["error"] * 2
    assert "at most 64 fit" in answers[0].error and "at most 63 fit" in answers[1].error


def test_what_no_engine_could_pool_is_an_error_of_that_request_alone(engine: Any) -> None:
    prompt = prompts()[3]
    wrong = [pooled("max"), pooled(LAST, dimensions=0), SamplingParams(max_tokens=1, pooling=Pooling(), grammar="x")]
    (answers,), _ = engine.run([(prompt, sampling) for sampling in [*wrong, pooled(MEAN)]])
    assert [answer.finish_reason for answer in answers] == ["error"] * 3 + ["stop"]
    assert "choose one of last, mean, cls" in answers[0].error and "at least 1" in answers[1].error


# ---- the pooler, step by step ----
class Steps:
    """Hidden states of 8 dimensions; position p of request r has the value 100 r + p."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tables = RowTables(4, 64, 4, 1, torch.device("cpu"))
        self.pooler = Pooler(self.tables)
        self.dtype = dtype

    def begin(self, row: int, request: int, length: int, kind: str) -> None:
        new = NewRow(row, request, bytes(4 * length), length, 0, pooled(kind, normalize=False))
        self.tables.stage(StepPlan(0, [], [], [], [], 0, [new], [[]]), _NoUpload())

    def run(self, *rows: tuple[int, int, int, int]) -> list[float | None]:
        """(row, request, computed before, tokens) → the first dimension of what comes out."""
        numbers, requests, begins, counts = (list(column) for column in zip(*rows, strict=True))
        states = [100.0 * r + p for r, b, n in zip(requests, begins, counts, strict=True) for p in range(b, b + n)]
        hidden = torch.tensor([*states, 9e9], dtype=self.dtype)[:, None].repeat(1, 8)  # with a row of padding
        plan = StepPlan(0, numbers, counts, begins, [], 0, [], [[]], [], list(range(len(rows))))
        last = hidden[torch.tensor(counts).cumsum(0) - 1]
        found = self.pooler(plan, last, hidden if self.pooler.needs_all(plan) else None)
        for buffer in (last, hidden):
            buffer.fill_(float("nan"))  # a CUDA graph's buffer: the next step overwrites it
        return [None if e is None else float(vector(e)[0]) for e in found.embeddings(found.vectors)]


class _NoUpload:
    def add(self, values: Any) -> int:
        return 0


def test_chunks_rows_and_whoever_was_there_before() -> None:
    steps = Steps(torch.float32)
    for row, kind in enumerate(POOLINGS):
        steps.begin(row, row + 1, 6, kind)
    assert steps.run((0, 1, 0, 3), (1, 2, 0, 4), (2, 3, 0, 1)) == []
    assert steps.run((0, 1, 3, 3), (1, 2, 4, 1), (2, 3, 1, 5)) == [105, 300]
    assert steps.run((1, 2, 5, 1)) == [202.5]
    # Requests that were aborted halfway leave their rows to others.
    steps.begin(1, 4, 6, MEAN)
    steps.begin(2, 5, 6, CLS)
    assert steps.run((1, 4, 0, 3), (2, 5, 0, 3)) == []
    steps.begin(1, 6, 6, LAST)
    steps.begin(2, 7, 6, MEAN)
    assert steps.run((1, 6, 4, 2), (2, 7, 0, 6)) == [605, 702.5]  # the first of them behind a cached prefix
    steps.begin(1, 8, 2, MEAN)
    steps.begin(2, 9, 4, CLS)
    assert steps.run((1, 8, 0, 2), (2, 9, 0, 2)) == [800.5]
    assert steps.run((2, 9, 2, 2)) == [900]


def test_sums_are_fp32_and_infinity_is_no_embedding() -> None:
    steps = Steps(torch.bfloat16)
    steps.begin(0, 1, 60, MEAN)
    assert steps.run((0, 1, 0, 30)) == []
    assert steps.run((0, 1, 30, 30)) == [pytest.approx(129.5, abs=0.3)]  # a sum in bfloat16 would be off by 10
    for kind in POOLINGS:
        steps.begin(1, 10**37, 2, kind)
        assert steps.run((1, 10**37, 0, 2)) == [None]


# ---- the scheduler's part ----
def scheduler_and(*requests: Request, **options: Any) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(100, 32, 8, block_size=4, num_blocks=101, **options))
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_what_was_pooled_of_who_has_left_is_forgotten() -> None:
    """With the next step, whoever it is of: chunks of 8 tokens wait by row until the prompt ends."""
    gone, text = Request(1, range(20), pooled(MEAN)), Request(2, range(5), SamplingParams(max_tokens=9))
    scheduler = Scheduler(SchedulerConfig(100, 8, 8, block_size=4, num_blocks=101))
    steps = Steps(torch.float32)

    def step() -> StepPlan:
        plan = scheduler.schedule()
        assert plan is not None
        steps.tables.stage(plan, _NoUpload())
        steps.pooler.forget(plan.left)
        hidden = torch.ones(plan.total_tokens, 8)
        if plan.pooled:
            steps.pooler(plan, hidden[: len(plan.pooled)], hidden)
        scheduler.update(StepResult(plan.step, [5] * len(plan.sampled), embeddings=[]))
        return plan

    scheduler.add(gone)
    (row,) = step().rows
    assert step().left == [] and list(steps.pooler._waiting) == [row]
    scheduler.abort([1])
    scheduler.add(text)
    assert step().left == [row] and not steps.pooler._waiting
    assert step().left == [] and not scheduler.prompt_results
    scheduler.check_invariants(thorough=True)


def test_an_embedding_made_of_a_failed_step_is_thrown_away() -> None:
    """The second request reads the prefix that the first one's step never wrote: it starts over."""
    first, second = (Request(id, range(20), pooled(kind)) for id, kind in ((1, MEAN), (2, LAST)))
    scheduler = scheduler_and(first, depth=2)
    one = scheduler.schedule()
    scheduler.add(second)
    two = scheduler.schedule()
    assert one is not None and two is not None and two.num_computed == [16] and two.pooled == [0] and not two.sampled
    assert [output.error for output in scheduler.fail(one.step, "boom")] == ["boom"]
    assert scheduler.update(StepResult(two.step, [], embeddings=[b"garbage!"])) == []
    three = scheduler.schedule()
    assert three is not None and three.num_computed == [0]
    (output,) = scheduler.update(StepResult(three.step, [], embeddings=[b"good"]))
    assert (output.id, output.embedding, output.finish_reason, output.token_ids) == (2, b"good", "stop", [])
    assert output.num_cached_tokens == 0 and output.first_scheduled is not None
    scheduler.check_invariants(thorough=True)
    assert scheduler.prompt_tokens_computed == 20


def test_nan_ends_the_request_and_its_cached_blocks() -> None:
    scheduler = scheduler_and(Request(1, range(20), pooled(LAST)))
    plan = scheduler.schedule()
    assert plan is not None
    (output,) = scheduler.update(StepResult(plan.step, [], embeddings=[None]))
    assert (output.finish_reason, output.error, output.embedding) == ("error", NOT_FINITE, None)
    assert scheduler.num_corrupted_requests == 1
    scheduler.add(Request(2, range(20), pooled(LAST)))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_computed == [0]


def test_who_does_not_pool_has_nothing_of_it_in_the_plan() -> None:
    scheduler = scheduler_and(Request(1, range(20), SamplingParams(max_tokens=2)))
    plan = scheduler.schedule()
    assert plan is not None and (plan.pooled, plan.scored, plan.sampled) == ([], [], [0])
    assert not scheduler.prompt_results
