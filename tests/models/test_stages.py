"""Models cut between layers: each stage reads its own tensors alone, together they compute what the whole one does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.describe.divide import check_stages, context_cost, split, stage_layers
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import check_model, parse_model_config, read_folder
from vserve.engine.errors import ModelError
from vserve.engine.families.layer_spec import KVSpec
from vserve.engine.files.checkpoint import SafetensorsFiles
from vserve.engine.models.blocks import CausalLM
from vserve.engine.parallel.pipeline import Stage, stage_of
from vserve.engine.planning.memory import weight_bytes
from vserve.engine.quant.weights import Placement
from vserve.engine.weights.loader import count_parameters, load_model, make_model

from .test_divide import LLAMA_70B, QWEN_30B_A3B
from .test_model_parity import CHUNKED, PagedRunner, difference, load, sequences

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 4}),
    "tied": ("qwen3", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "windows": ("gemma3_text", {"tie_word_embeddings": True}),
    "norms behind": ("olmo3", {}),
    "parallel": ("cohere2", {}),
    "scaled": ("granite", {"num_hidden_layers": 3}),
    "experts": ("gpt_oss", {}),
    "a dense layer, then experts": ("deepseek_v3", {"num_hidden_layers": 3}),
    "keys of two widths": ("mimo_v2_flash", {}),
    "chunks": ("llama4_text", {}),
    "gated delta nets": ("qwen3_5_text", {}),
    "short convolutions": ("lfm2_moe", {}),
    "Mamba-2": ("granitemoehybrid", {}),
    "Mamba-2 beside attention": ("falcon_h1", {"num_hidden_layers": 3}),
    "layers of a mixer or an MLP": ("nemotron_h", {}),
    "scaled layers": ("gemma4_text", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
}


class Cut:
    """Stages one after the other, as one model."""

    def __init__(self, folder: Path, counts: tuple[int, ...]) -> None:
        self.config = config = read_folder(folder)
        parts = stage_layers(config, len(counts), counts)
        self.stages: list[Any] = [
            load_model(
                folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=128,
                stage=Stage(index, len(parts), part),
            )
            for index, part in enumerate(parts)
        ]  # fmt: skip
        self.place = self.stages[-1].place

    def __call__(self, ids: Tensor, positions: Tensor, batch: Any, given: Any = None, wanted: Any = None) -> Tensor:
        found = given
        for stage in self.stages:
            found = stage(ids, positions, batch, found, wanted)
        return found

    def attention_layers(self) -> list[Any]:
        return [layer for stage in self.stages for layer in stage.attention_layers()]

    def state_layers(self) -> list[Any]:
        return [layer for stage in self.stages for layer in stage.state_layers()]

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.stages[-1].logits(hidden)
        return found


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_compute_what_the_whole_model_does(tiny_model: Callable[..., Path], name: str) -> None:
    family, keys = FAMILIES[name]
    folder = tiny_model(family, **keys)
    whole, num_layers = load(folder), len(read_folder(folder).layers)
    expected = PagedRunner(whole, sequences()).run(CHUNKED)
    cuts = [(1, num_layers - 1), (num_layers - 1, 1), (1,) * num_layers]
    for counts in dict.fromkeys(cuts):
        found = PagedRunner(Cut(folder, counts), sequences()).run(CHUNKED)  # type: ignore[arg-type]
        assert difference(found, expected) == 0.0, counts  # not even a sum is made in another order


def test_a_stage_reads_its_own_tensors_alone(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = tiny_model("llama", num_hidden_layers=4, tie_word_embeddings=False), set[str]()
    original = SafetensorsFiles.read

    def noted(self: Any, name: str) -> Tensor:
        read.add(name)
        return original(self, name)

    monkeypatch.setattr(SafetensorsFiles, "read", noted)
    config, taken = read_folder(folder), []
    for index, part in enumerate(parts := stage_layers(config, 3, (2, 1, 1))):
        read.clear()
        stage, admitted = Stage(index, 3, part), []
        model = load_model(
            folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, stage=stage,
            admit=lambda *sizes, told=admitted: told.append(sizes),  # type: ignore[misc]
        )  # fmt: skip
        taken.append(set(read))
        assert {int(name.split(".")[2]) for name in read if ".layers." in name} == set(part)
        assert 4 * count_parameters(config, stage=stage) == weight_bytes(model) == 4 * admitted[0][0]
        assert admitted[0][1] == pytest.approx(weight_bytes(model), abs=1)
    assert "model.embed_tokens.weight" in taken[0] and {"model.norm.weight", "lm_head.weight"} <= taken[2]
    assert not any(one & other for one, other in pairwise(taken)) and len(parts) == 3
    read.clear()
    load(folder)
    assert set.union(*taken) == read


def test_what_is_missing_is_missed_by_the_stage_that_needs_it(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """And nobody takes what no stage has a place for."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model("llama", num_hidden_layers=4), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = read_folder(tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    load_model(tmp_path, config, stage=Stage(0, 2, range(2)), **options)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.3\.mlp\.down_proj\.weight"):
        load_model(tmp_path, config, stage=Stage(1, 2, range(2, 4)), **options)
    tensors["model.layers.4.mlp.down_proj.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has model\.layers\.4\.mlp\.down_proj\.weight, which"):
        load_model(tmp_path, config, stage=Stage(0, 2, range(2)), **options)


# ---- who has how many layers ----


def config(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config({**raw, **changes})


def test_the_stages_of_large_models() -> None:
    """The output matrix is worth a layer or two, and nobody has many more than others."""
    llama = config(LLAMA_70B, num_hidden_layers=80)
    for size in (2, 3, 4, 7, 8):
        counts = split(llama, size)
        assert sum(counts) == 80 and len(counts) == size
        assert counts[-1] == min(counts) and max(counts) - min(counts) <= 3, counts
    assert split(llama, 2) in ((40, 40), (41, 39))
    small = config(LLAMA_70B, num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32)
    assert split(small, 2)[1] <= 7, "its output matrix is as large as four layers"
    assert split(config(QWEN_30B_A3B, num_hidden_layers=48), 4)[3] < 12
    assert split(llama, 80) == (1,) * 80 and split(llama, 1) == (80,)


def test_no_other_cut_has_a_much_smaller_largest_stage() -> None:
    """Of all cuts of layers that are not alike."""
    from itertools import combinations

    raw = {**QWEN_30B_A3B, "num_hidden_layers": 7, "mlp_only_layers": [0, 1, 4], "vocab_size": 40_000}
    model = config(raw)
    place = Placement(torch.float32, torch.device("meta"))
    assert isinstance(make_model(model, place, 1), CausalLM)

    def largest(counts: tuple[int, ...]) -> float:
        parts = stage_layers(model, len(counts), counts)
        sizes = [count_parameters(model, stage=Stage(i, len(parts), part)) for i, part in enumerate(parts)]
        return max(sizes)

    cuts = [tuple(b - a for a, b in pairwise((0, *ends, 7))) for ends in combinations(range(1, 7), 2)]
    best = min(map(largest, cuts))
    assert largest(split(model, 3)) <= 1.35 * best, "memory is half of what is weighed"


def test_what_cannot_be_cut_is_refused(tiny_model: Callable[..., Path]) -> None:
    llama = config(LLAMA_70B)
    check_stages(llama, 1)
    check_stages(llama, 2, (1, 1))
    with pytest.raises(ModelError, match="--pipeline-parallel-size 3: the model has 2 layers, and every"):
        check_stages(llama, 3)
    with pytest.raises(ModelError, match="--pipeline-layer-partition 2,1 deals out 3 layers, and the model has 2"):
        check_stages(llama, 2, (2, 1))
    with pytest.raises(ModelError, match="--pipeline-parallel-size 4: the model has 2 layers") as refused:
        check_model(tiny_model("llama"), stages=4)
    assert "\n" not in str(refused.value)


def test_the_ring() -> None:
    """Rank 0 has the last stage, and whoever is behind a rank has the next one."""
    for size, stages in ((2, 2), (3, 3), (4, 2), (8, 4), (6, 3)):
        each = size // stages
        assert stage_of(0, size, stages) == stages - 1
        for rank in range(size):
            assert stage_of((rank + each) % size, size, stages) == (stage_of(rank, size, stages) + 1) % stages


def test_context_costs_more_where_layers_are_small() -> None:
    large = context_cost(config(LLAMA_70B))
    assert large == pytest.approx(1.7 * 2 * 8192 / (8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)), rel=1e-6)
    assert context_cost(config(LLAMA_70B, intermediate_size=7168)) > 2 * large


# ---- the cache ----


def test_every_stage_has_the_groups_of_the_whole_model() -> None:
    """So that one scheduler hands out blocks for all; windows are dealt to groups as evenly as they can be."""
    specs = [KVSpec(2, 16, 16, 0 if i % 6 == 5 else 64) for i in range(62)]
    whole = KVLayout.of(specs, 16, 8192)
    assert len(whole.groups) == 7
    for part in (range(31), range(31, 62), range(5), range(5, 62)):
        layout = whole.of_stage([specs[i] for i in part], part)
        assert layout.windows == whole.windows
        held = sorted(layer for group in layout.groups for layer in group.layers)
        assert held == list(range(len(part)))
        for group in layout.groups:
            assert {specs[part[layer]].window for layer in group.layers} <= {group.window}
        of_windows = [len(group.layers) for group in layout.groups if group.window]
        assert max(of_windows) - min(of_windows) <= 1
        assert layout.request_blocks(5000) == whole.request_blocks(5000)
    alike = KVLayout.of([KVSpec(2, 16, 16)] * 4, 16, 256)
    assert alike.of_stage([KVSpec(1, 16, 16)], range(2, 3)).groups[0].layers == (0,)
