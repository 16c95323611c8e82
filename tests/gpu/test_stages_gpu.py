"""Two stages on one card, one after the other in this process: as right as the whole model, launched and in graphs."""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.describe.divide import stage_layers
from vserve.engine.describe.reading import read_folder
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.parallel.pipeline import WHOLE, Stage
from vserve.engine.schedule.request import Request
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.start.warm_steps import warm_up_steps
from vserve.engine.step.runner import ModelRunner
from vserve.engine.step.sampled import Pending
from vserve.engine.weights.loader import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SHAPE, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "windows": ("gemma3_text", {}),
    "experts": ("gpt_oss", {"num_local_experts": 4}),
}
BLOCKS, SEQS, LENGTH = 200, 32, 512


class Link:
    """A ring's links, where both ends are here."""

    def __init__(self, ours: deque[Tensor], theirs: deque[Tensor]) -> None:
        self.ours, self.theirs = ours, theirs

    def send(self, x: Tensor) -> None:
        self.theirs.append(x)

    def receive(self, x: Tensor) -> Tensor:
        sent = self.ours.popleft()
        assert sent.shape == x.shape and sent.dtype == x.dtype
        return x.copy_(sent)


def runners(folder: Path, num_stages: int) -> list[ModelRunner]:
    config = read_folder(folder)
    links: list[deque[Tensor]] = [deque(), deque()]
    found = []
    for index, part in enumerate(stage_layers(config, num_stages)):
        stage = WHOLE
        if num_stages > 1:
            ring: Any = Link(links[index - 1], links[index])
            stage = Stage(index, num_stages, part, ring)
        model = load_model(
            folder, config, dtype=torch.float32, device=DEVICE, max_model_len=LENGTH, stage=stage
        )  # fmt: skip
        runner = ModelRunner(model, max_num_seqs=SEQS, max_model_len=LENGTH, block_size=16, device=DEVICE)
        runner.bind_cache(BLOCKS, torch.float32)
        found.append(runner)
    return found


def answers(stages: list[ModelRunner], windows: tuple[int, ...]) -> list[list[int]]:
    """As the engine loop runs them, with as many plans in flight."""
    count = len(stages)
    config = SchedulerConfig(
        LENGTH, 256, SEQS, num_blocks=BLOCKS, windows=windows, depth=count + 1, pipeline_parallel_size=count,
        max_mixed_tokens=128, context_cost=1e-3 if count > 1 else 0.0, enable_prefix_caching=False,
    )  # fmt: skip
    scheduler = Scheduler(config)
    found: list[list[int]] = []
    for i in range(48):
        prompt = [(7 * i * i + 3 * j * j + j) % 290 + 5 for j in range((3, 17, 40, 130)[i % 4])]
        heat = 0.8 if i % 3 == 0 else 0.0
        sampling = SamplingParams(max_tokens=20 + i, temperature=heat, seed=i, ignore_eos=True)
        scheduler.add(Request(i, array("i", prompt), sampling))
        found.append([])
    pending: deque[Pending] = deque()
    while scheduler.has_unfinished():
        while len(pending) < config.depth and (plan := scheduler.schedule()) is not None:
            for stage in stages[:-1]:
                stage.execute(plan)
                stage.follow()
            stages[-1].execute(plan)
            pending.append(stages[-1].sample())
        for output in scheduler.update(pending.popleft().wait()):
            assert not output.error
            found[output.id] += output.token_ids
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_on_a_card_answer_as_the_whole_model(tiny_model: Any, name: str) -> None:
    family, keys = MODELS[name]
    folder = tiny_model(family, **keys)
    (whole,) = runners(folder, 1)
    stages = runners(folder, 2)
    windows = whole.layout.windows
    assert [stage.layout.windows for stage in stages] == [windows, windows]
    expected = answers([whole], windows)
    assert len({tuple(answer) for answer in expected}) == len(expected)
    assert answers(stages, windows) == expected
    for step in warm_up_steps(SEQS, 256):  # or kernels would be compiled while graphs are captured
        whole.dummy_step(*step)
    for stage in stages:
        stage.capture_graphs(stage.plan_graphs(SEQS, 128, ()))
    assert answers(stages, windows) == expected
    assert all(stage.num_graph_misses == 0 for stage in stages)
