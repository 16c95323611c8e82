"""A step that fails while drafts are made, as where the card has no memory for their logits, ends its own requests."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
import torch

from vserve.engine.link.plan import StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.speculation.drafter import Scratch
from vserve.engine.speculation.model_drafter import ModelDrafter
from vserve.engine.step.runner import ModelRunner

SERVED = {"max_num_seqs": 128, "max_model_len": 112}


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    random = Random(5)
    free = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return [([random.randrange(5, 290) for _ in range(random.randrange(1, 40))], free) for _ in range(count)]


@pytest.mark.parametrize("place", ["filling the tables", "drawing"])
def test_the_next_step_has_the_tables_of_requests(engine: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Those for drafts have rows for 32 requests; the next step has 60, and drafts no more until they are few."""
    owner, name = (Scratch, "slots") if place == "filling the tables" else (ModelDrafter, "_draw")
    work, propose, execute = getattr(owner, name), ModelDrafter.propose, ModelRunner.execute
    steps: list[int] = []  # what warms up has none
    tables: list[set[torch.Size]] = []

    def stepping(self: ModelRunner, plan: StepPlan) -> None:
        steps.extend([plan.step] if plan.step >= 0 else [])
        execute(self, plan)

    def failing(self: Any, *args: Any) -> Any:
        if len(steps) == 2:
            raise torch.OutOfMemoryError("no memory for the logits of drafts")
        return work(self, *args)

    def recorded(self: ModelDrafter, *args: Any) -> torch.Tensor:
        tables.append({layer.cache.block_table.shape for layer in self.layers if layer.cache is not None})
        return propose(self, *args)

    (expected,), _ = engine.run(requests(60), **SERVED)
    monkeypatch.setattr(ModelRunner, "execute", stepping)
    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(ModelDrafter, "propose", recorded)
    few = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 2, 3]]}
    drafting = json.dumps({"model": str(engine.folder), **few})
    (failed, answers, again), stats = engine.run(
        requests(1), requests(60), requests(1), speculative_config=drafting, **SERVED
    )
    assert failed[0].finish_reason == "error" and "no memory" in failed[0].error
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert again[0].tokens == expected[0].tokens and sum(stats.num_accepted_tokens) > 0
    assert set.union(*tables) == {torch.Size((129, 7))}
