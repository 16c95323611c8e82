"""How many tokens each expert got: counted by routers, padding left out, and told beside other totals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vserve.engine.layers import routing
from vserve.engine.layers.routing import WINDOW, ExpertCounter, ExpertLoad
from vserve.engine.link.sampling_params import SamplingParams


@pytest.mark.parametrize("depth", [1, 2])
def test_every_token_is_counted_once(
    mixture_engine: Any, overlap: Any, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """In the one mixture that is not the last layer; warm-up is not counted."""
    monkeypatch.setattr(routing, "EXPERT_SECONDS", 0.0)
    if depth > 1:
        overlap(depth)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    batch = [([3 + n, *range(10, 10 + 5 * n)], sampling) for n in range(1, 5)]
    _, stats = mixture_engine.run(batch)
    tokens = sum(len(prompt) + 5 for prompt, _ in batch)  # the last one that is generated is not computed
    assert len(stats.expert_tokens) == 5  # of which a token goes to three
    assert sum(stats.expert_tokens) == 3 * tokens


def test_a_dense_model_has_none(engine: Any) -> None:
    _, stats = engine.run([([1, 2, 3], SamplingParams(max_tokens=2))])
    assert stats.expert_tokens == () and stats.expert_imbalance == 0.0


def test_the_imbalance_is_of_windows_that_say_something() -> None:
    counter, counts = ExpertCounter(), torch.zeros(2, 4, dtype=torch.int64)
    counts[:, 1] = 5
    assert counter.take(counts) == ((0, 10, 0, 0), 0.0), "of so few tokens chance decides"
    counts += torch.tensor([[2, 1, 1, 0], [1, 1, 1, 1]]) * WINDOW
    tokens, imbalance = counter.take(counts)
    assert tokens == tuple(counts.sum(0).tolist()) and imbalance == pytest.approx(
        (2 * WINDOW / (WINDOW + 5 / 4) + (WINDOW + 5) / (WINDOW + 5 / 4)) / 2
    )
    assert counter.take(counts + 1).imbalance == imbalance, "the next window is not full"
    counts += WINDOW
    assert counter.take(counts).imbalance == 1.0


def test_rows_of_any_number_of_experts_are_aligned() -> None:
    load = ExpertLoad(3, 5, torch.device("cpu"))
    for layer in load.layers:
        assert len(layer) == 5 and layer.data_ptr() % 16 == 0
        layer += 1
    assert load.counts.sum() == 15
    load.clear()
    assert not load.counts.any()
