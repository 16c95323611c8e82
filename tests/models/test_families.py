"""What tells families apart: each setting shows in the logits, each way to write a checkpoint is read (fp32, CPU)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import read_folder, read_model_config
from vserve.engine.families.rope_config import RopeConfig
from vserve.engine.layers.linear import Linear
from vserve.engine.models.blocks import CausalLM
from vserve.engine.options.config import EngineConfig
from vserve.engine.quant.quantize import to_fp8, to_int4, to_nf4
from vserve.engine.weights.loader import load_model

from ..quant.checkpoints import write
from .test_model_parity import WHOLE, PagedRunner, difference, make, oracle, sequences


def build(folder: Path, config: ModelConfig, **changes: Any) -> CausalLM:
    values = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64} | changes
    return load_model(folder, config, **values)


def logits_of(model: CausalLM) -> list[torch.Tensor]:
    return PagedRunner(model, sequences()).run(WHOLE)


# family, variant → settings that are put in the place of what its config.json says
LAYER_SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma2", "gqa", {"mixer": {"soft_cap": 0.0}}),
    ("gemma2", "gqa", {"mixer": {"scale": 0.0}}),
    ("gemma2", "gqa", {"mixer": {"window": 9}}),
    ("gemma", "gqa", {"mlp": {"activation": "silu"}}),
    ("gemma3_text", "gqa", {"mixer": {"rope": RopeConfig(theta=1e6)}}),
    ("phi3", "part", {"mixer": {"rotated": 0}}),
    ("glm", "gqa", {"mixer": {"interleaved": False}}),
    ("glm4", "gqa", {"mixer": {"rotated": 0}}),
    ("granite", "gqa", {"mixer": {"scale": 0.0}}),
    ("granite", "gqa", {"residual_scale": 1.0}),
    ("cohere", "each", {"mixer": {"interleaved": False}}),
    ("cohere2", "gqa", {"mixer": {"rope": RopeConfig()}}),
    ("olmo3", "yarn", {"mixer": {"rope": RopeConfig()}}),
    ("smollm3", "gqa", {"mixer": {"rope": RopeConfig(theta=2e6)}}),
    ("exaone4", "gqa", {"mixer": {"rope": RopeConfig()}}),
]


@pytest.mark.parametrize(("family", "variant", "settings"), LAYER_SETTINGS, ids=str)
def test_a_layers_setting_is_noticed(
    tiny_model: Callable[..., Path], family: str, variant: str, settings: dict[str, Any]
) -> None:
    folder = make(tiny_model, family, variant=variant)
    config = read_folder(folder)
    layers = tuple(
        replace(
            layer,
            **{
                key: replace(getattr(layer, key), **value) if isinstance(value, dict) else value
                for key, value in settings.items()
            },
        )
        for layer in config.layers
    )
    assert layers != config.layers
    assert difference(logits_of(build(folder, replace(config, layers=layers))), oracle(folder)) > 1e-2


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma", {"norm": "rms"}),
        ("gemma", {"embedding_scale": 1.0}),
        ("gemma2", {"logit_cap": 0.0}),
        ("granite", {"embedding_scale": 1.0}),
        ("granite", {"logit_scale": 1.0}),
        ("cohere", {"norm": "rms"}),
        ("cohere", {"logit_scale": 1.0}),
    ],
    ids=str,
)
def test_what_stands_around_the_layers_is_noticed(
    tiny_model: Callable[..., Path], family: str, settings: dict[str, Any]
) -> None:
    folder = make(tiny_model, family)
    config = read_folder(folder)
    changed = replace(config, frame=replace(config.frame, **settings))
    assert difference(logits_of(build(folder, changed)), oracle(folder)) > 1e-2


@pytest.mark.parametrize(("max_len", "which"), [(64, 0), (32, 1)], ids=["long", "short"])
def test_longrope_has_the_factors_of_the_longest_context(
    tiny_model: Callable[..., Path], max_len: int, which: int
) -> None:
    """As transformers has them for a sequence beyond the original length, and for one within it."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + 0.7 * i for i in range(6)]}
    folder = tiny_model(
        "phi3", max_position_embeddings=64, original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "partial_rotary_factor": 0.75, **factors},
    )  # fmt: skip
    model = build(folder, read_folder(folder), max_model_len=max_len)
    lengths = [len(sequence) for sequence in sequences()]
    assert lengths[0] > 32 >= lengths[1]
    found = PagedRunner(model, [sequences()[which]]).run([["|", (0, 20)]])
    assert difference(found, [oracle(folder)[which]]) < 2e-4
    assert difference(found, [oracle(folder)[which].roll(1, 0)]) > 1e-2


OLD = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."}  # fmt: skip


@pytest.mark.parametrize("dialect", ["old", "new"])
def test_both_names_of_the_text_beside_pictures(tiny_model: Callable[..., Path], tmp_path: Path, dialect: str) -> None:
    source = make(tiny_model, "gemma3")
    folder = shutil.copytree(source, tmp_path / "model")
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for new, old in OLD.items():
            before, after = (new, old) if dialect == "old" else (old, new)
            if name.startswith(before):
                name = after + name.removeprefix(before)
                break
        tensors[name] = tensor
    beginnings = {name.split(".layers.")[0] for name in tensors if ".layers.0.mlp.gate" in name}
    assert beginnings == {"language_model.model" if dialect == "old" else "model.language_model"}
    assert any("vision_tower" in name for name in tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert difference(logits_of(build(folder, read_folder(folder))), oracle(source)) < 2e-4


def test_options_change_the_text_beside_pictures(tiny_model: Callable[..., Path]) -> None:
    def described(**options: Any) -> ModelConfig:
        return read_model_config(folder, EngineConfig(str(folder), **options))

    folder = make(tiny_model, "gemma3")
    before = described().layers
    assert described(hf_overrides='{"sliding_window": 5}').layers[0].attention.window == 5
    assert described(hf_overrides='{"text_config": {"sliding_window": 5}}').layers[0].attention.window == 5
    sliding, full, _ = (layer.attention.rope for layer in described(rope_theta=7e5).layers)
    assert sliding == before[0].attention.rope, "that of layers with a window stays"
    assert full == replace(before[1].attention.rope, theta=7e5)
    both = {"full_attention": {"rope_theta": 3e5}, "sliding_attention": {"rope_theta": 2e4}}
    ropes = [layer.attention.rope for layer in described(hf_overrides=json.dumps({"rope_parameters": both})).layers]
    assert ropes == [RopeConfig(theta=2e4), RopeConfig(theta=3e5), RopeConfig(theta=2e4)]
    full = described(rope_scaling='{"rope_type": "linear", "factor": 2.0}').layers[1].attention.rope
    assert (full.type, full.factor, full.theta) == ("linear", 2.0, 1e6)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "phi3", "glm4", "granite", "cohere", "olmo2"])
def test_bfloat16_is_near(tiny_model: Callable[..., Path], family: str) -> None:
    folder = make(tiny_model, family)
    found = torch.cat(logits_of(build(folder, read_folder(folder), dtype=torch.bfloat16)))
    expected = torch.cat(oracle(folder))
    assert (found - expected).square().mean().sqrt() / expected.std() < 0.08


def test_what_looks_at_pictures_and_what_drafts_are_left_out(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3_5"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in weights)
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in weights
    save_file({**weights, "mtp.fc.weight": torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    model = build(folder, read_folder(folder))
    assert model.config.architecture == "Qwen3_5ForConditionalGeneration" and len(model.layers) == 4


def matrices(model: CausalLM) -> dict[str, torch.Tensor]:
    """Of each Linear, what it makes of the unit vectors: its matrix, transposed."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    return {name: layer(torch.eye(layer.shape.in_features)) for name, layer in found.items()}


@pytest.mark.parametrize("family", ["phi3", "glm4", "gemma3", "qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("kind", ["awq", "gptq", "fp8", "fp8_blocks", "nf4"])
def test_quantised_files_of_fused_and_interleaved_parts(
    kind: str, family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Rows that change places take their scales with them."""
    variant = "whole groups" if family == "qwen3_next" else "gqa"  # of columns that share a scale
    folder = write(make(tiny_model, family, variant=variant), tmp_path, kind)
    model, twin = (build(folder / name, read_folder(folder / name)) for name in ("quantized", "twin"))
    expected = matrices(twin)
    for name, found in matrices(model).items():
        limit = 5e-3 if kind in ("awq", "gptq") else 1e-6  # torch's int4 product rounds scale and result to bf16
        assert (found - expected[name]).norm() <= limit * expected[name].norm(), name


@pytest.mark.parametrize("quantise", [to_int4, to_fp8, to_nf4])
def test_codes_with_their_rows_in_another_order(quantise: Callable[..., Any]) -> None:
    codes = quantise(torch.randn(24, 256, generator=torch.Generator().manual_seed(0)))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(codes.in_order(order).dequantize(), codes.dequantize()[order])
