"""What drafts can be captured in a CUDA graph: on the meta device, whatever a host would have to look at raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vserve.engine.layers.attention as attention_module
import vserve.engine.speculation.model_drafter as drafter_module
from vserve.engine.cache.batch import Batch, Shape
from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.cache.kv_storage import allocate
from vserve.engine.cache.rows import RowTables
from vserve.engine.describe.reading import read_folder
from vserve.engine.layers.attention import AttentionBatch
from vserve.engine.models.blocks import CausalLM
from vserve.engine.options.speculation import Speculation
from vserve.engine.quant.weights import Placement
from vserve.engine.speculation.loading import find_draft
from vserve.engine.speculation.model_drafter import ModelDrafter
from vserve.engine.speculation.networks import DraftModel, EagleHead
from vserve.engine.weights.matching import choose_formats
from vserve.kernels.attention.attention_parts import PagedCache

META = torch.device("meta")


@pytest.mark.parametrize("name", ["eagle3", "eagle", "model"])
def test_no_drafter_waits_for_the_device(
    load_module: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = load_module(Path(__file__).parents[1] / "draft_models.py")
    folder = tiny_model("llama", num_hidden_layers=6)
    config, place = read_folder(folder), Placement(torch.float32, META)
    target = CausalLM(config, place, 128)
    network: Any = DraftModel(CausalLM(config, place, 128))
    settings = Speculation(3, 5, 5, ((8, 3),), method="x", model=str(folder))
    if name != "model":
        head = made.eagle3(tmp_path, draft_vocab=90) if name == "eagle3" else made.eagle(tmp_path)
        described: Any = find_draft(Speculation(3, 5, 5, (), "", str(head)), folder, config, None).described
        network = EagleHead(described, target, 128, place)
        network.token_ids = torch.zeros(90, dtype=torch.int64, device=META) if name == "eagle3" else None
    for part in (target, network if name != "model" else network.model):
        for holder in choose_formats(part):
            holder.create()
            holder.finish()
    # The kernels of a card launch without a look at what they read; their twins for the CPU do look.
    monkeypatch.setattr(attention_module, "decode_attention", lambda *_, **__: None)
    works = []
    monkeypatch.setattr(attention_module, "prefill_attention", lambda *_, work, **__: works.append(work))
    monkeypatch.setattr(attention_module, "rope_write_kv", lambda *_, **__: None)
    drawn = []

    def sample(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        drawn.append(logits.shape)
        return torch.empty(len(logits), dtype=torch.int32, device=META)

    monkeypatch.setattr(drafter_module, "sample", sample)
    drafter = ModelDrafter(network, settings)
    drafter.prepare(24, 16, META)
    tables = RowTables(8, 128, 8, 1, META)
    layout = KVLayout.of([layer.spec for layer in drafter.layers], 16, 128)
    caches = allocate(layout, 40, torch.float32, META, dict.fromkeys(range(len(layout.specs)), 48))
    for layer, cache in zip(drafter.layers, caches, strict=True):
        layer.bind(PagedCache(*cache, tables.block_tables[0]))
    drafter.bind(40)
    shape = Shape(4, 3, 40, 40, 3)

    def ints(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=META)

    attention = AttentionBatch(4, 4, 40, ints(7), ints(7), ints(8), [ints(40)])
    if network.features is not None:
        network.features.reserve(40)
    found = drafter.propose(tables, Batch(ints(40), ints(40), attention, ints(40)), ints(6, 32), shape)
    assert found.shape == (7,) and found.dtype == torch.int32
    assert drawn == [(7, 300)] * 3
    # A table that an earlier pass over the same batch had made would not be made by the graph.
    made_before = attention.prefill_work, attention.last_work
    assert works and not any(work is earlier for work in works for earlier in made_before)
    large = Shape(20, 8, 40, 40, 0)  # of more rows than it drafts for: it reads only
    attention = AttentionBatch(20, 1, 40, ints(28), ints(28), ints(29), [ints(40)])
    assert drafter.propose(tables, Batch(ints(40), ints(40), attention, ints(40)), ints(6, 48), large).shape == (28,)
    assert len(drawn) == 3
