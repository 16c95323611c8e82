"""Rows of padding beside those that are drafted for: they get drafts too, and write nothing that anybody reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.cache.batch import Shape
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.speculation.model_drafter import ModelDrafter
from vserve.engine.step.runner import ModelRunner


@pytest.fixture(scope="module")
def served(tiny_model: Any, engine: Any) -> Any:
    return type(engine)(tiny_model("llama", num_hidden_layers=6))


def padded(shape: Shape) -> Shape:
    """As CUDA graphs have it: rows that decode, prompts, and tokens that are nobody's."""
    prompts = 3 if shape.prefill_rows else 0
    rows = shape.decode_rows + 2
    tokens = shape.tokens + 2 * (1 + shape.num_drafts) + 5 + 2 * prompts
    return replace(
        shape, decode_rows=rows, prefill_rows=shape.prefill_rows + prompts, tokens=tokens,
        max_query_len=shape.max_query_len + prompts,
    )  # fmt: skip


class Watch:
    """Compares everything that others read, before and behind each proposal: rows, and the cache of every layer."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.drafts, self.padding = runner, [], 0
        assert runner.model_drafter is not None
        self.own = {id(layer) for layer in runner.model_drafter.layers}
        for layer in runner.layers:  # whoever reads what lies there finds no number
            if id(layer) in self.own:
                layer.cache.keys[0] = layer.cache.values[0] = float("nan")

    def everything(self) -> dict[str, Tensor]:
        tables = self.runner.tables
        found = {
            "recent": tables.history.recent, "pages": tables.history.pages,
            "num_proposed": tables.num_proposed, "num_computed": tables.num_computed,
            "params": tables.params, **{f"blocks {i}": table for i, table in enumerate(tables.block_tables)},
        }  # fmt: skip
        for number, layer in enumerate(self.runner.layers):
            # Of those of drafts, what lies behind the cache's blocks is its own.
            blocks = len(self.runner.layers[0].cache.keys)
            found[f"keys {number}"], found[f"values {number}"] = layer.cache.keys[:blocks], layer.cache.values[:blocks]
        return {name: table.clone() for name, table in found.items()}

    def propose(self, real: Any, batch: Any, header: Tensor, shape: Shape) -> Tensor:
        tables = self.runner.tables
        before = self.everything()
        proposed: Tensor = real(self.runner.model_drafter, tables, batch, header, shape)
        behind = self.everything()
        rows, samples = header[0, : shape.rows].tolist(), header[2, : shape.rows].tolist()
        nobody = [index for index, row in enumerate(rows) if row == tables.dummy_row]
        assert not proposed[nobody].any()
        self.padding += len(nobody)
        for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            if row == tables.dummy_row or sample < 0:
                continue
            known, count = int(tables.num_computed[row]), self.runner.num_drafts
            places = torch.arange(known + 1, known + 1 + count) % tables.history.ring
            drafts = behind["recent"][row, places]
            if proposed[index]:
                self.drafts.append((tables.history.tokens(row, known + 1, known).tolist(), drafts.tolist()))
            before["recent"][row, places] = drafts
            before["num_proposed"][row] = proposed[index]
        for table in (before["recent"], behind["recent"]):
            table[tables.dummy_row] = 0  # where drafts of nobody go
        slots = {slot for group in batch.attention.slots for slot in group.tolist() if slot >= 0}
        places = torch.tensor(sorted(slots))
        for number, layer in enumerate(self.runner.layers):
            if id(layer) in self.own:  # it has read the step's tokens
                for name in (f"keys {number}", f"values {number}"):
                    before[name].flatten(0, 1)[places] = behind[name].flatten(0, 1)[places]
        for name, table in before.items():
            torch.testing.assert_close(behind[name], table, rtol=0, atol=0, equal_nan=True, msg=name)
        return proposed


@pytest.mark.parametrize("name", ["eagle3", "model"])
@pytest.mark.slow
def test_padding_writes_nothing_that_anybody_reads(
    served: Any, load_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = load_module(Path(__file__).parents[1] / "draft_models.py")
    drafter = made.eagle3(tmp_path / "head") if name == "eagle3" else served.folder
    asked = {"model": str(drafter), "num_speculative_tokens": 3}
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 4}, {"temperature": 0.0, "max_tokens": 3}, {"seed": 5}]
    batch = [
        ([7 + i] * length, SamplingParams(**{"max_tokens": 14, "ignore_eos": True, **way}))
        for i, (length, way) in enumerate(zip((3, 40, 90, 17), ways, strict=True))
    ]
    options = {"max_num_batched_tokens": 48, "block_size": 4, "speculative_config": json.dumps(asked)}
    watches: list[Watch] = []
    bind, real = ModelRunner.bind_cache, ModelDrafter.propose

    def bind_cache(self: ModelRunner, *arguments: Any) -> None:
        bind(self, *arguments)
        watches.append(Watch(self))

    monkeypatch.setattr(ModelRunner, "bind_cache", bind_cache)
    monkeypatch.setattr(
        ModelDrafter, "propose", lambda self, tables, *arguments: watches[-1].propose(real, *arguments)
    )  # fmt: skip
    (bare,), _ = served.run(batch, **options)
    of = Shape.of
    monkeypatch.setattr(Shape, "of", lambda plan: padded(of(plan)))
    (answers,), _ = served.run(batch, **options)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in bare]
    first, second = watches
    assert second.drafts == first.drafts and len(first.drafts) > 12
    assert first.padding == 0 and second.padding > 20
