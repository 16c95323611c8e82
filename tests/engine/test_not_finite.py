"""Weights and activations that make numbers which are none: requests end with an error, not with one token for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vserve.engine.link.plan import NOT_FINITE
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.models.blocks import CausalLM

TOKEN = 7
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.2},
    "excluded": {"temperature": 0.0, "bad_words": ((TOKEN,),)},
    "with_logprobs": {"temperature": 0.0, "logprobs": 2},
}


def params(way: str) -> SamplingParams:
    return SamplingParams(max_tokens=6, ignore_eos=True, **WAYS[way])


@pytest.fixture
def engine_with(engine: Any, tmp_path: Path) -> Callable[..., Any]:
    """engine_with(weight, row, value) → an engine whose checkpoint has this value in a row of this weight."""

    def make(name: str, row: int, value: float) -> Any:
        folder = tmp_path / "model"
        shutil.copytree(engine.folder, folder)
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights[name][row] = value
        save_file(weights, file, metadata={"format": "pt"})
        return type(engine)(folder)

    return make


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_of_the_output_matrix(engine_with: Callable[..., Any], value: float) -> None:
    """The hidden states are sound, and so are the logits of all other tokens."""
    requests = [([1, 20, 30], params(way)) for way in WAYS]
    waves, stats = engine_with("lm_head.weight", TOKEN, value).run(*([request] for request in requests), requests)
    answers = [answer for wave in waves for answer in wave]
    assert [(a.finish_reason, a.error, a.tokens) for a in answers] == [("error", NOT_FINITE, [])] * 2 * len(WAYS)
    assert stats.num_corrupted_requests == 2 * len(WAYS)


def test_squares_beyond_fp32(engine: Any, engine_with: Callable[..., Any]) -> None:
    """Of one request among others; these answer as they do without it, beside it and after."""
    sound = [([1, 20, 30], params(way)) for way in WAYS]
    broken = [([1, 99, 30], params(way)) for way in WAYS]
    (alone,), _ = engine.run(sound)
    (answers, again), stats = engine_with("model.embed_tokens.weight", 99, 1e20).run(sound + broken, sound)
    failed = answers[len(sound) :]
    assert [(a.finish_reason, a.error, a.tokens) for a in failed] == [("error", NOT_FINITE, [])] * len(WAYS)
    assert all(answer.finish_reason == "length" for answer in alone)
    expected = [answer.tokens for answer in alone]
    assert [answer.tokens for answer in answers[: len(sound)]] == [answer.tokens for answer in again] == expected
    assert stats.num_corrupted_requests == len(WAYS)


def test_all_tokens_at_minus_infinity(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was excluded: an error of the model, not of the request's constraints."""
    monkeypatch.setattr(CausalLM, "logits", lambda self, hidden: torch.full((len(hidden), 512), float("-inf")))
    (answers,), _ = engine.run([([1, 20, 30], params(way)) for way in WAYS])
    assert {answer.error for answer in answers} == {NOT_FINITE}
