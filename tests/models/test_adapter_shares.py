"""Adapters over ranks: each packs its share, and what the ranks add is together what one would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vserve.engine.adapters.adapter import Adapter
from vserve.engine.adapters.layout import AdapterStore, SlotLayout
from vserve.engine.adapters.tables import AdapterTables
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError
from vserve.engine.layers.linear import Linear
from vserve.engine.link.plan import NewRow, StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.parallel.group import SingleGroup
from vserve.engine.parallel.pipeline import WHOLE, Stage
from vserve.engine.quant.weights import Placement
from vserve.engine.weights.loader import load_model, whole_of

HEAD, PREFIX = 16, "model.layers.0.self_attn"
SAMPLING = SamplingParams(max_tokens=1)


def deltas(folder: Path, rank: int, size: int, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """What the adapter adds on this rank: to q, k and v [T, its heads], and its summand of the output's [T, 64]."""
    place = Placement(torch.float32, torch.device("cpu"), SingleGroup(rank, size))
    qkv = Linear(64, {"q": 64, "k": 32, "v": 32}, place=place, rule="column", unit=HEAD)
    out = Linear(64, {"out": 64}, place=place, rule="row", unit=HEAD)
    names = {f"{PREFIX}.{part}_proj": (qkv, part) for part in "qkv"} | {f"{PREFIX}.o_proj": (out, "out")}
    layout = SlotLayout(SimpleNamespace(weight_map=lambda: names), 16)  # type: ignore[arg-type]
    store = AdapterStore(layout, torch.float32, pin=False)
    tables = AdapterTables(store, 2, place.device, max_tokens=8, max_rows=4)
    tables.load(1, layout.pack(Adapter.open(folder), torch.float32, False))
    row = NewRow(0, 0, np.zeros(len(x), np.int32).tobytes(), len(x), 0, SAMPLING, slot=1)
    plan = StepPlan(1, [0], [len(x)], [0], [0], 0, [row], [[]])
    assert tables.begin(plan)
    tables.group(plan, len(x), 1)
    assert qkv.adapter is not None and out.adapter is not None
    mine = attended.narrow(1, *out.shape.input_span)
    return (
        qkv.adapter.added(x, lambda: x.new_zeros(len(x), qkv.shape.rows)),
        out.adapter.added(mine, lambda: x.new_zeros(len(x), 64)),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_shares_of_ranks_are_the_whole(size: int, tiny_model: Any, adapter_files: Any, tmp_path: Path) -> None:
    """With four ranks and two key heads, neighbours hold the same one."""
    base = tiny_model("llama", num_hidden_layers=1)
    folder = adapter_files.write_adapter(tmp_path / "a", base, ("q_proj", "k_proj", "v_proj", "o_proj"))
    x, attended = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).unbind()
    whole, added = deltas(folder, 0, 1, x, attended)
    assert whole.abs().min() > 0 and added.abs().max() > 0
    shares = [deltas(folder, rank, size, x, attended) for rank in range(size)]
    torch.testing.assert_close(sum(summand for _, summand in shares), added)
    heads = 64 // size, max(HEAD, 32 // size), max(HEAD, 32 // size)
    for part, wanted in enumerate(whole.split([64, 32, 32], dim=1)):
        mine = [share.split(heads, dim=1)[part] for share, _ in shares]
        distinct = mine if part == 0 or size == 2 else mine[::2]
        torch.testing.assert_close(torch.cat(distinct, dim=1), wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_the_places_of_the_whole(tied: bool, tiny_model: Any) -> None:
    """Each once: the embedding's where tokens are looked up, though the last stage may have it for its head."""
    base = tiny_model("llama", num_hidden_layers=3, tie_word_embeddings=tied)
    config, targets = read_folder(base), ("embed_tokens", "lm_head", "o_proj")

    def layout(stage: Stage) -> SlotLayout:
        model = load_model(
            base, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, stage=stage
        )  # fmt: skip
        return SlotLayout(model, 16, targets, whole_of(model))

    whole = layout(WHOLE)
    stages = [layout(Stage(index, 2, part)) for index, part in enumerate((range(2), range(2, 3)))]
    assert sum(stage.size for stage in stages) == whole.size
    assert [list(stage.parts) for stage in stages] == [list(whole.parts)[:3], list(whole.parts)[3:]]
    assert all(stage.holders.keys() == whole.holders.keys() for stage in stages)
    with pytest.raises(ConfigError, match="has 'wq': this model has down_proj, embed_tokens, gate_proj, k_proj, lm_"):
        targets = ("wq",)
        layout(Stage(0, 2, range(2)))
