"""Models with sliding windows in the real engine: the same tokens as transformers, and no more memory than windows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.describe.reading import read_folder
from vserve.engine.link.sampling_params import SamplingParams

WINDOW = 20
NUM_OUTPUTS = 40
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "window and full": ("qwen3", {
        "use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "from a layer on": ("qwen2", {
        "use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 3, "max_window_layers": 2,
    }),
    "windows alone": ("mistral", {"sliding_window": WINDOW}),
    "gemma 3": ("gemma3_text", {"sliding_window": WINDOW, "num_hidden_layers": 6,
                                "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}),
}  # fmt: skip
# Steps of 24 tokens, blocks of 4: prompts of five windows are read in pieces, and windows slide while they are.
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 12, "block_size": 4, "max_model_len": 160}


@pytest.fixture(scope="module", params=MODELS)
def folder(tiny_model: Any, request: pytest.FixtureRequest) -> Path:
    family, overrides = MODELS[request.param]
    path: Path = tiny_model(family, **overrides)
    return path


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    """12 of them, of up to seven windows with their answers; some share a prefix, some are short."""
    rng = random.Random(5)
    stem = [rng.randrange(5, 290) for _ in range(70)]
    sizes = [(0, 3), (0, 5), (0, 4), (0, 6), (0, 3), (70, 30), (30, 20), (70, 20), (0, 60), (30, 50), (70, 9), (30, 7)]
    prompts = [stem[:common] + [rng.randrange(5, 290) for _ in range(own)] for common, own in sizes]
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
    return [(prompt, sampling) for prompt in prompts]


@torch.inference_mode()
def check(folder: Path, requests: list[tuple[list[int], SamplingParams]], answers: list[Any]) -> None:
    """Each token is what transformers finds most likely after all before it, or as likely as that."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (prompt, _), answer in zip(requests, answers, strict=True):
        assert answer.finish_reason == "length", answer.error
        assert len(answer.tokens) == NUM_OUTPUTS
        logits = theirs(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < 1e-3, f"another token than transformers' after {len(prompt)}"


@pytest.fixture
def window_engine(engine: Any, folder: Path) -> Any:
    return type(engine)(str(folder))


# Without a cache nothing differs from model to model but what the other tests have as well.
UNCACHED = [
    pytest.param(name, False, id=f"{name}-uncached", marks=[] if name == "window and full" else pytest.mark.slow)
    for name in MODELS
]


@pytest.mark.parametrize(
    ("folder", "caching"), [*(pytest.param(name, True, id=f"{name}-cached") for name in MODELS), *UNCACHED],
    indirect=["folder"],
)  # fmt: skip
def test_a_tiny_cache_gives_transformers_tokens(window_engine: Any, folder: Path, requests: Any, caching: bool) -> None:
    """Twelve at once in a cache that holds a few: preempted, resumed, their blocks taken by others meanwhile."""
    layers = read_folder(folder).layers
    layout = KVLayout.of([layer.attention.kv for layer in layers], 4, 160)
    blocks = layout.request_blocks(160, chunk=24)  # of one alone
    (answers,), stats = window_engine.run(
        requests, num_gpu_blocks_override=blocks, enable_prefix_caching=caching, **OPTIONS
    )
    check(folder, requests, answers)
    assert stats.num_preemptions > 0
    if not caching or (len(layout.groups) <= 3 and 0 in layout.windows):  # of others, no whole window survives here
        assert (stats.prefix_hits > 0) == caching


def test_a_long_prefix_is_hit_after_its_windows_were_left_behind(
    window_engine: Any, folder: Path, requests: Any
) -> None:
    (first, again, longer), _ = window_engine.run(
        requests, requests, [([*prompt, 7, 8, 9], sampling) for prompt, sampling in requests],
        num_gpu_blocks_override=2000, **OPTIONS
    )  # fmt: skip
    check(folder, requests, first)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    for (prompt, _), answer in zip(requests, again, strict=True):
        assert answer.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    check(folder, [([*prompt, 7, 8, 9], sampling) for prompt, sampling in requests], longer)


def test_what_is_left_behind_may_hold_nan(window_engine: Any, folder: Path, requests: Any, monkeypatch: Any) -> None:
    """Free blocks, and the null block, are full of NaN before every step: whoever reads one answers with an error."""
    from vserve.engine.schedule.scheduler import Scheduler
    from vserve.engine.step.runner import ModelRunner

    schedulers: list[Scheduler] = []
    schedule, execute = Scheduler.schedule, ModelRunner.execute

    def noting(self: Scheduler) -> Any:
        schedulers[:] = [self]
        return schedule(self)

    def poisoning(self: ModelRunner, plan: Any) -> None:
        if schedulers:
            pool = schedulers[0].kv.pool
            unused = [block for block, refs in enumerate(pool.refs) if block == 0 or refs == 0]
            for layer in self.model.attention_layers():
                assert layer.cache is not None
                layer.cache.keys[unused] = layer.cache.values[unused] = torch.nan
        execute(self, plan)

    monkeypatch.setattr(Scheduler, "schedule", noting)
    monkeypatch.setattr(ModelRunner, "execute", poisoning)
    (answers,), _ = window_engine.run(requests, num_gpu_blocks_override=150, enable_prefix_caching=False, **OPTIONS)
    check(folder, requests, answers)
