"""Which steps expand what is cached of their prompts, where, and that the answers are those of absorbed attention."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vserve.engine.cache import latent_prompts
from vserve.engine.cache.latent_prompts import DUMMY_TOKENS, FULL_REQUESTS, LatentPrompts
from vserve.engine.describe.reading import read_folder
from vserve.engine.link.plan import BlockWrite, NewRow, StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.models import latent_attention
from vserve.engine.options.config import EngineConfig
from vserve.engine.planning.card import CARDS
from vserve.engine.planning.setup import set_up
from vserve.engine.step.runner import ModelRunner
from vserve.engine.weights.loader import load_model
from vserve.kernels.attention.latent_prompts import LatentSizes

CPU, GREEDY = torch.device("cpu"), SamplingParams(max_tokens=9, temperature=0.0)
ROWS = ((0, 61), (1, 9), (2, 40))  # row and prompt


def plan(lengths: list[int], computed: list[int], decodes: int = 0, step: int = 0) -> StepPlan:
    rows = list(range(len(lengths)))
    return StepPlan(step, rows, lengths, computed, [], decodes, [], [[]])


def test_steps_that_expand() -> None:
    """DeepSeek V3 on eight cards: where that spares products, and with a graph, more of them than launching takes."""
    prompts = LatentPrompts(LatentSizes(512, 64, 128, 128, 16))
    assert not prompts.expands(plan([4000], [0]), has_graph=False), "before there is a workspace"
    prompts.allocate(1000, torch.float32, CPU)
    assert prompts.expands(plan([1, 4000], [9, 0], decodes=1), has_graph=True)
    assert prompts.expands(plan([200], [100_000]), has_graph=False)
    assert not prompts.expands(plan([100], [100_000]), has_graph=False)
    assert prompts.expands(plan([1, 20], [9, 0], decodes=1), has_graph=False)
    assert not prompts.expands(plan([1, 20], [9, 0], decodes=1), has_graph=True)
    assert not prompts.expands(plan([1000], [0]), has_graph=True)
    assert prompts.expands(plan([1000], [30_000]), has_graph=True)
    assert not prompts.expands(plan([1, 1], [9000, 9000], decodes=2), has_graph=False), "no prompts"


def test_warm_up_meets_both_ways() -> None:
    prompts = LatentPrompts(LatentSizes(512, 64, 128, 128, 16))
    prompts.allocate(1000, torch.float32, CPU)
    assert prompts.expands(plan([DUMMY_TOKENS + 1], [0], step=-1), has_graph=False)
    assert not prompts.expands(plan([2000, 2000], [0, 0], step=-1), has_graph=False)
    assert not prompts.expands(plan([DUMMY_TOKENS], [0], step=-1), has_graph=False)


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model("deepseek_v3")


def runner_of(folder, max_model_len: int = 128, max_num_seqs: int = 4) -> ModelRunner:
    config = read_folder(folder)
    model = load_model(folder, config, dtype=torch.float32, device=CPU, max_model_len=max_model_len)
    return ModelRunner(model, max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=16, device=CPU)


def test_the_workspace_is_planned(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are among those that the memory plan takes from the cache, as it is cut by its limit too."""
    for limit in (1 << 29, 1 << 18, 1):
        monkeypatch.setattr(latent_prompts, "WORKSPACE_BYTES", limit)
        runner = runner_of(folder, max_model_len=120, max_num_seqs=3)
        planned = runner.cache.scratch_bytes(4)
        runner.bind_cache(9, torch.float32)
        assert runner.latent_prompts is not None and runner.latent_prompts.numbers is not None
        assert runner.latent_prompts.numbers.nbytes == planned
        row, head = 32 + 8, 16 + 8 + 12
        assert planned == 4 * max(128 * (row + head), min(3 * 128 * (row + 4 * head), limit // 4))


def test_vserve_plan_counts_the_workspace(folder, tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_folder(folder)
    planned, made = LatentPrompts.planned(config), LatentPrompts.of(runner_of(folder).model)
    assert planned is not None and made is not None and planned.sizes == made.sizes
    halves = LatentPrompts.planned(config, 2)
    assert halves is not None and planned is not None and halves.sizes.heads == planned.sizes.heads // 2
    # Of long contexts each rank's workspace is as large as one card's: it holds more heads at a time.
    assert halves.elements(64, 1 << 20, 2) == planned.elements(64, 1 << 20, 2)
    assert LatentPrompts.planned(read_folder(tiny_model("llama"))) is None
    engine = EngineConfig("m", max_model_len=120, block_size=16)
    caches = []
    for limit in (1 << 29, 1 << 15):
        monkeypatch.setattr(latent_prompts, "WORKSPACE_BYTES", limit)
        caches.append(set_up(0, config, engine, CARDS["h200"]).cache)
    whole = 2 * FULL_REQUESTS * 128 * (40 + 4 * 36)  # in bfloat16, as a card serves it
    assert caches[1] - caches[0] == whole - (1 << 15)


def test_models_without_latents_have_none(tiny_model) -> None:
    runner = runner_of(tiny_model("llama"))
    runner.bind_cache(9, torch.float32)
    assert runner.latent_prompts is None and runner.cache.scratch_bytes(4) == 0


def logits_of(runner: ModelRunner, prompts: dict[int, list[int]], steps: list[list[tuple[int, int]]]) -> torch.Tensor:
    """steps: (row, tokens) of each; single tokens behind others decode. → logits of all prompts' last tokens."""
    runner.bind_cache(40, torch.float32)
    runner.tables.num_computed.zero_()
    computed, known, found = dict.fromkeys(prompts, 0), set(), []
    for number, step in enumerate(steps):
        rows = [row for row, _ in step]
        decodes = sum(count == 1 and computed[row] > 0 for row, count in step)
        new = [
            NewRow(row, row, np.array(prompts[row], dtype=np.int32).tobytes(), len(prompts[row]), 0, GREEDY)
            for row in rows
            if row not in known
        ]
        blocks = [BlockWrite(row.row, 0, list(range(1 + 5 * row.row, 6 + 5 * row.row))) for row in new]
        known |= set(rows)
        sampled = [index for index, (row, count) in enumerate(step) if computed[row] + count == len(prompts[row])]
        lengths, before = [count for _, count in step], [computed[row] for row in rows]
        runner.execute(StepPlan(number, rows, lengths, before, sampled, decodes, new, [blocks]))
        assert runner._launched is not None
        if sampled:
            found.append(runner.model.logits(runner._launched.hidden).clone())
        for row, count in step:
            computed[row] += count
            runner.tables.num_computed[row] = computed[row]
        runner._launched = None
    return torch.cat(found)


STEPS = {
    "at once": [[(0, 61), (1, 9), (2, 40)]],
    "chunks": [[(0, 30), (1, 9)], [(0, 30), (2, 23)], [(0, 1), (2, 17)]],
    "beside a decode": [[(0, 60)], [(0, 1), (1, 9), (2, 24)], [(2, 16)]],
}


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("steps", STEPS)
def test_expanded_steps_are_absorbed_ones(folder, steps: str, tight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits to rounding, whichever steps expand and in whatever pieces."""
    if tight:
        monkeypatch.setattr(latent_prompts, "WORKSPACE_BYTES", 1)
    rng = random.Random(7)
    prompts = {row: [rng.randrange(300) for _ in range(length)] for row, length in ROWS}
    runner = runner_of(folder, max_model_len=80)
    calls = []
    theirs = latent_attention.expanded_attention
    monkeypatch.setattr(latent_attention, "expanded_attention", lambda *args: calls.append(1) or theirs(*args))
    found = {}
    for expands in (True, False):
        monkeypatch.setattr(LatentPrompts, "expands", lambda *_, expands=expands: expands)
        calls.clear()
        found[expands] = logits_of(runner, prompts, STEPS[steps])
        assert len(calls) == 2 * len(STEPS[steps]) * expands, "of each layer and step"
    assert len(found[True]) == 3
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-5)


def test_a_step_that_expands_is_no_graph_miss(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(folder)
    runner.bind_cache(9, torch.float32)
    replayed = []
    graph = SimpleNamespace(shape=None, graph=SimpleNamespace(replay=lambda: replayed.append(1)))
    runner.graphs = SimpleNamespace(find=lambda plan: graph, expects=lambda plan: True)  # type: ignore[assignment]
    monkeypatch.setattr(LatentPrompts, "expands", lambda self, plan, has_graph: has_graph)
    new = NewRow(0, 0, bytes(4 * 20), 20, 0, GREEDY)
    step = StepPlan(0, [0], [20], [0], [0], 0, [new], [[BlockWrite(0, 0, [1, 2])]])
    runner.execute(step)
    assert not replayed and runner.num_graph_misses == 0
