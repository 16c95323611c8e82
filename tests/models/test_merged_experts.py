"""Adapters of a mixture's experts, merged as the model is loaded: the logits of the weights that PEFT would merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vserve.engine.adapters.adapter import Adapter
from vserve.engine.adapters.layout import SlotLayout
from vserve.engine.adapters.peft_files import AdapterError

Load = Callable[[Path], Any]
FAMILIES = (
    "qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "gpt_oss",
    "minimax_m2", "mimo_v2_flash", "hy_v3", "laguna",
)  # fmt: skip
SEVEN = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "q_proj")


@pytest.fixture(scope="module")
def parity(load_module: Load) -> Any:
    return load_module(Path(__file__).with_name("test_model_parity.py"))


@pytest.fixture(scope="module")
def mixtures(load_module: Load) -> Any:
    return load_module(Path(__file__).with_name("test_mixtures.py"))


def transformers_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def gap(parity: Any, base: Path, folder: Path, oracle: Any) -> float:
    """Of logits: this adapter merged as the base is loaded, and the oracle's."""
    model = parity.load(base, adapter=Adapter.open(folder))
    with torch.inference_mode():
        expected = [oracle(sequence[None]).logits[0] for sequence in parity.sequences()]
    found: float = parity.difference(parity.PagedRunner(model, parity.sequences()).run(parity.CHUNKED), expected)
    return found


def spoil(folder: Path, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(name for name in tensors if name.endswith(ending))
    save_file(tensors | {name: change(tensors[name].clone()).contiguous()}, file)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_all_experts(
    family: str, parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """However the checkpoint has them: a tensor an expert, one of all, or that transposed with rows in turn."""
    base = tiny_model(family)
    model = transformers_model(base)
    folder = adapter_files.write_experts_adapter(tmp_path / "a", model)
    assert gap(parity, base, folder, model) > 1e-2
    # gpt-oss's logits alone, without an adapter, are 1.1e-4 from transformers'.
    assert gap(parity, base, folder, adapter_files.merge_experts(model, folder)) < (2e-4 if "oss" in family else 1e-4)


@pytest.mark.parametrize("names", [("gate_up_proj",), ("down_proj",)])
@pytest.mark.parametrize("old", [False, True])
def test_one_parameter_alone_and_files_of_older_versions(
    names: tuple[str, ...], old: bool, parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """Older versions took the sides for each other. Where these are alike, as here, the version tells."""
    base = tiny_model("qwen3_moe", moe_intermediate_size=32 if "gate_up_proj" in names else 64)
    model = transformers_model(base)
    patterns = {"rank_pattern": {r".*\.experts\..*": 3}, "alpha_pattern": {rf".*\.{names[0]}": 6}}
    folder = adapter_files.write_experts_adapter(tmp_path / "a", model, names, rank=3, old=old, r=8, **patterns)
    assert gap(parity, base, folder, adapter_files.merge_experts(model, folder, names, old=old)) < 1e-4


def test_sides_of_older_versions_by_their_shapes(
    parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe")
    model = transformers_model(base)
    folder = adapter_files.write_experts_adapter(tmp_path / "a", model, old=True)
    assert gap(parity, base, folder, adapter_files.merge_experts(model, folder, old=True)) < 1e-4


def test_transposed_parameters_were_never_taken_for_the_other(
    parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """gpt-oss's down_proj has sides that are alike, in its real sizes too."""
    base = tiny_model("gpt_oss", intermediate_size=64)
    model = transformers_model(base)
    folder = adapter_files.write_experts_adapter(tmp_path / "a", model, old=True)
    assert gap(parity, base, folder, adapter_files.merge_experts(model, folder)) < 2e-4


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_on_experts_in_one_tensor(
    family: str, transposed: bool, parity: Any, mixtures: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """Both of an adapter with a pair for each expert's product, as transformers 4 named them, and of one of all."""
    plain = tiny_model(family)
    base = Path(shutil.copytree(plain, tmp_path / "base"))
    save_file(mixtures.stacked(load_file(base / "model.safetensors"), transposed), base / "model.safetensors")
    single = adapter_files.write_adapter(tmp_path / "single", plain, SEVEN)
    oracle = adapter_files.merged_checkpoint(plain, single, tmp_path / "merged")
    assert gap(parity, plain, single, oracle) < 1e-4
    assert gap(parity, base, single, oracle) < 1e-4
    model = transformers_model(plain)
    of_all = adapter_files.write_experts_adapter(tmp_path / "all", model)
    assert gap(parity, base, of_all, adapter_files.merge_experts(model, of_all)) < 1e-4


def test_dora_of_experts_in_one_tensor(
    parity: Any, mixtures: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """Gate and up have lengths of their own, though they are one tensor."""
    plain = tiny_model("qwen3_moe")
    base = Path(shutil.copytree(plain, tmp_path / "base"))
    save_file(mixtures.stacked(load_file(base / "model.safetensors"), True), base / "model.safetensors")
    folder = adapter_files.write_adapter(tmp_path / "a", plain, SEVEN, use_dora=True)
    oracle = adapter_files.merged_checkpoint(plain, folder, tmp_path / "merged")
    assert gap(parity, base, folder, oracle) < 1e-4


@pytest.mark.parametrize("ending", ["experts.lora_A.weight", "experts.lora_B.weight", "base_layer.lora_B.weight"])
def test_one_experts_wrong_matrix_is_noticed(
    ending: str, parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe")
    model = transformers_model(base)
    folder = adapter_files.write_experts_adapter(tmp_path / "a", model)
    adapter_files.merge_experts(model, folder)

    def other_expert(matrix: torch.Tensor) -> torch.Tensor:
        if "lora_A" in ending:
            matrix[4:8] = matrix[:4].clone()
        else:
            matrix[:, 1::5] = matrix[:, ::5].clone()
        return matrix

    spoil(folder, ending, other_expert)
    assert gap(parity, base, folder, model) > 1e-3


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_router_beside_its_experts(
    family: str, parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """As PEFT makes `all-linear` of a mixture: patterns look at the parameter, not at the module. Mixtral's files have
    another name for it than transformers. Beside other adapters it cannot be, and that is said."""
    base = tiny_model(family)
    model = transformers_model(base)
    folder = adapter_files.write_experts_adapter(
        tmp_path / "a", model, alpha_pattern={"gate.weight": 4}, target_parameters=[
            "gate_up_proj", "down_proj", "gate.weight",
        ],
    )  # fmt: skip
    file, generator, tensors = folder / "adapter_model.safetensors", torch.Generator().manual_seed(1), {}
    routers = [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]
    for name in routers:
        rows, columns = model.get_submodule(name).weight.shape
        tensors[f"{adapter_files.PREFIX}{name}.lora_A.weight"] = torch.randn(4, columns, generator=generator) / 8
        tensors[f"{adapter_files.PREFIX}{name}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    save_file(load_file(file) | tensors, file)
    oracle = adapter_files.merge_experts(model, folder)
    assert gap(parity, base, folder, oracle) > 1e-3
    with torch.no_grad():
        for name in routers:
            a, b = (tensors[f"{adapter_files.PREFIX}{name}.lora_{kind}.weight"] for kind in "AB")
            oracle.get_submodule(name).weight += b @ a
    assert gap(parity, base, folder, oracle) < 1e-4
    save_file(tensors, file)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_parameters": ["gate.weight"]}))
    with pytest.raises(AdapterError, match=r"changes model.layers.\d.mlp.gate, and only .* serve it with --merge-lora"):
        SlotLayout(parity.load(base), 16).check(Adapter.open(folder))


def test_what_does_not_fit_is_said_in_one_line(
    parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe")
    model = transformers_model(base)
    write = adapter_files.write_experts_adapter

    def error(folder: Path, base: Path = base) -> str:
        with pytest.raises(AdapterError) as raised:
            parity.load(base, adapter=Adapter.open(folder))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    half = write(tmp_path / "half", model)
    file = half / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_parameters": ["experts.down_proj"]}))
    assert "has 2 pairs of model.layers.0.mlp.experts, and its target_parameters name down_proj" in error(half)
    ranks = write(tmp_path / "ranks", model, r=3)
    assert "model.layers.0.mlp.experts.down_proj has the rank 3" in error(ranks) or "experts of" in error(ranks)
    other = write(tmp_path / "other", transformers_model(tiny_model("qwen3_moe", num_experts=4)))
    assert "has 4 experts of [64, 40] for model.layers.0.mlp.experts.down_proj, and the base 5" in error(other)
    wide = write(tmp_path / "wide", transformers_model(tiny_model("qwen3_moe", moe_intermediate_size=48)))
    assert "it is of another base" in error(wide)
    assert "the base model has no such experts" in error(write(tmp_path / "dense", model), tiny_model("qwen3"))
    biases = write(tmp_path / "biases", model, target_parameters=["mlp.experts.gate_up_proj_bias"])
    assert "target_parameters has 'mlp.experts.gate_up_proj_bias', and only gate_up_proj and down" in error(biases)
    router = write(tmp_path / "router", model, target_parameters=["gate_up_proj", "down_proj", "gate.weight"])
    assert "lacks the matrices of gate.weight" in error(router)
    lost = adapter_files.write_adapter(
        tmp_path / "lost", base, ["q_proj", "v_proj"], skip=lambda m: "1.self_attn.v" in m
    )
    assert "lacks the matrices of model.layers.1.self_attn.v_proj, which its target_modules name" in error(lost)
    nothing = adapter_files.write_adapter(tmp_path / "no", base, ["q_proj"], target_parameters=["experts.down_proj"])
    assert "lacks the matrices of experts.down_proj" in error(nothing)
