"""What cannot draft for a model is refused in one line, before weights are read where the headers tell."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.speculation import read_speculation
from vserve.engine.planning.machine import Machine
from vserve.engine.planning.settings import resolve
from vserve.engine.speculation.loading import find_draft, load_drafter
from vserve.engine.weights.loader import load_model

CPU = Machine(torch.device("cpu"), "cpu", 0, 1)


@pytest.fixture(scope="module")
def made(load_module: Any) -> Any:
    return load_module(Path(__file__).parents[1] / "draft_models.py")


@pytest.fixture(scope="module")
def target(tiny_model: Any) -> Path:
    return tiny_model("llama", num_hidden_layers=6)


def found(target: Path, asked: dict[str, Any]) -> Any:
    settings = read_speculation(json.dumps(asked))
    assert settings is not None
    return find_draft(settings, target, read_folder(target), None)


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """With these tensors, by names with _ for a dot; None: without."""
    every = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        every.pop(name, None)
        if tensor is not None:
            every[name] = tensor
    save_file(every, folder / "model.safetensors")
    return folder


HEADS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"target_hidden_size": 80}, "config.json says target_hidden_size 80, the model's hidden_size is 64"),
    ({"draft_vocab": 90}, {"d2t": None}, "its lm_head.weight is of 90 tokens, the model's vocabulary has 300"),
    ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "eagle_aux_hidden_state_layer_ids are [1, 2, 6], the model"),
    ({"sizes": 48}, {}, "config.json says hidden_size 48, the model has 64, and the head has no embed_tokens.weight"),
    ({}, {"method": "eagle"}, "its method is 'eagle', but"),
    ({}, {"model_type": "medusa"}, "has heads of Medusa (model_type medusa), which are not served"),
    ({}, {"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, "heads of EAGLE are served with a layer like Llama's"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "changes", "message"), HEADS)
def test_heads_of_other_models(
    made: Any, target: Path, tmp_path: Path, how: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    if "sizes" in how:
        how = {"sizes": made.Sizes(hidden=how["sizes"])}
    asked = {"model": str(tmp_path / "head"), **({"method": changes.pop("method")} if "method" in changes else {})}
    without_d2t = "d2t" in changes
    changes.pop("d2t", None)
    if "DeepseekV3" in str(changes):
        changes = {**changes, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "v_head_dim": 8}
    folder = made.eagle3(tmp_path / "head", **how, **changes)
    if without_d2t:
        changed(folder, d2t=None)
    with pytest.raises(ConfigError) as caught:
        found(target, asked)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("--speculative-config: ")


def test_a_key_of_any_kind_is_read_or_refused(made: Any, target: Path, tmp_path: Path) -> None:
    """Of all that heads add to a config.json."""
    folder = made.eagle3(tmp_path / "head")
    raw, layers = json.loads((folder / "config.json").read_text()), "eagle_aux_hidden_state_layer_ids"
    keys = ("transformer_layer_config", "eagle_config", layers, "target_hidden_size", "draft_vocab_size")
    wrong = [{key: value} for key in keys for value in ("x", -1, 1.5, True, ["x"], math.nan, 10**30)]
    wrong += [{"eagle_config": {layers: value}} for value in ("x", 7, [None], {"a": 1})]
    for changes in wrong:
        (folder / "config.json").write_text(json.dumps(raw | changes))
        with pytest.raises(ConfigError) as caught:
            found(target, {"model": str(folder)})
        assert "\n" not in str(caught.value) and str(caught.value).startswith("--speculative-config: "), changes
    (folder / "config.json").write_text(json.dumps(raw | {"eagle_config": {layers: [0, 2, 3]}}))
    assert found(target, {"model": str(folder)}).described.taps == (0, 2, 3)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", torch.zeros(64, 128), "fc.weight has shape [64, 128] in model.safetensors, config.json makes it"),
        ("midlayer.mlp.down_proj.weight", None, "the checkpoint lacks midlayer.mlp.down_proj.weight"),
        (
            "fc_norm.0.weight",
            torch.ones(64),
            "the checkpoint has fc_norm.0.weight, which LlamaForCausalLM has",
        ),
        ("d2t", torch.arange(90) + 260, "d2t names the token 300, the model has tokens 0 to 299: use the head that"),
        ("d2t", torch.zeros(80, dtype=torch.int64), "d2t is torch.int64 [80], it must be int64 [90]"),
    ],
)
def test_weights_that_do_not_fit(
    made: Any, target: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    folder = changed(made.eagle3(tmp_path, draft_vocab=90), **{name: tensor})
    model = load_model(target, read_folder(target), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    with pytest.raises(ConfigError) as caught:
        load_drafter(found(target, {"model": str(folder)}), model, 64)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_that_claims_codes_and_has_none_is_told(
    made: Any, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a model is: it takes more memory than its name promises."""
    claim = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    folder = made.eagle3(tmp_path, quantization_config=claim)
    model = load_model(target, read_folder(target), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_drafter(found(target, {"model": str(folder)}), model, 64)
    assert f"{folder}: config.json says that the checkpoint is quantized (awq), and its files hold plain" in caplog.text


def test_other_models(made: Any, target: Path, tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json says vocab_size 320, the model has 300"):
        found(target, {"model": str(tiny_model("qwen3", vocab_size=320))})
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layers for multi-token prediction"):
        found(target, {"method": "mtp"})
    with pytest.raises(ConfigError, match="GraniteForCausalLM scales what it adds to its residual streams"):
        found(tiny_model("granite", num_hidden_layers=6), {"model": str(made.eagle3(tmp_path))})


def test_no_model_drafts_beside_stages(target: Path) -> None:
    config = EngineConfig(str(target), speculative_config='{"model": "m"}', pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="beside --pipeline-parallel-size 2: a model drafts beside a whole one only"):
        resolve(config, read_folder(target), CPU)


@pytest.mark.parametrize(("ranks", "draft_ranks", "may"), [(1, 2, "1"), (4, 2, "4, as --tensor-parallel-size")])
def test_over_how_many_ranks_a_drafter_is_divided(target: Path, ranks: int, draft_ranks: int, may: str) -> None:
    model = read_folder(target)

    def resolved(size: int) -> Any:
        asked = json.dumps({"model": "m", "draft_tensor_parallel_size": size})
        return resolve(EngineConfig(str(target), speculative_config=asked, tensor_parallel_size=ranks), model, CPU)

    assert [resolved(size).speculation.num_ranks for size in (1, ranks)] == [1, ranks]
    with pytest.raises(ConfigError) as caught:
        resolved(draft_ranks)
    assert f"its draft_tensor_parallel_size is {draft_ranks}: it must be {may}" in str(caught.value)


def test_drafters_that_cannot_be_divided(made: Any, target: Path, tmp_path: Path, tiny_model: Any) -> None:
    """The target can, over 4; they may be whole on every rank."""
    head = made.eagle3(tmp_path, sizes=made.Sizes(inner=98))
    model = tiny_model("qwen3", intermediate_size=98)
    config = read_folder(target)
    for folder in (head, model):
        for asked in ({}, {"draft_tensor_parallel_size": 4}):
            settings = read_speculation(json.dumps({"model": str(folder), **asked}))
            assert settings is not None
            assert find_draft(settings, target, config, None).folder == folder
            with pytest.raises(ConfigError) as caught:
                find_draft(settings, target, config, None, num_ranks=4)
            assert f"{folder}: an MLP of 98 cannot be divided over 4 ranks: say " in str(caught.value)
        whole = dataclasses.replace(settings, num_ranks=1)
        assert find_draft(whole, target, config, None, num_ranks=4).settings.num_ranks == 1


def test_targets_of_transformers(target: Path) -> None:
    config = EngineConfig(str(target), speculative_config='{"model": "m"}', model_impl="transformers")
    model = read_folder(target, implementation="transformers")
    with pytest.raises(ConfigError, match="LlamaForCausalLM is computed by transformers' code, beside which no model"):
        resolve(config, model, CPU)


def test_the_method_that_a_checkpoint_has_is_told(made: Any, target: Path, tmp_path: Path, tiny_model: Any) -> None:
    folders = {"eagle3": made.eagle3(tmp_path / "a"), "eagle": made.eagle(tmp_path / "b"), "draft_model": target}
    for method, folder in folders.items():
        asked = json.dumps({"model": str(folder), "num_speculative_tokens": 2})
        draft = found(target, json.loads(asked))
        assert draft.settings.method == method
        resolved = resolve(EngineConfig(str(target), speculative_config=asked), read_folder(target), CPU)
        told = resolved.drafted_by(draft.settings.method).speculative_config
        assert json.loads(told) == {
            **json.loads(asked),
            "method": method,
        }
    assert found(target, {"model": str(target), "max_model_len": 30}).settings.max_model_len == 30
    assert dataclasses.replace(draft.settings).max_model_len == 512, "the draft's own context"
