"""Families whose layers are not llama's: as they are published, in names, configurations and quantised layouts."""

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
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from vserve.engine.describe.divide import check_divides, check_stages
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import parse_model_config, read_folder, without_windows
from vserve.engine.errors import ModelError
from vserve.engine.families.layer_spec import MoESpec
from vserve.engine.layers.experts import Experts
from vserve.engine.models.blocks import CausalLM
from vserve.engine.models.mlp import with_stored_experts
from vserve.engine.weights.loader import count_parameters, load_model

from ..quant.checkpoints import write
from .test_model_parity import WHOLE, PagedRunner, difference, make, oracle, sequences

FAMILIES = (
    "gemma4_text", "minimax_m2", "mimo_v2_flash", "hy_v3", "laguna", "llama4_text", "lfm2_moe", "granitemoehybrid",
    "falcon_h1", "nemotron_h",
)  # fmt: skip
# What is quantised in groups of columns wants whole ones.
WHOLE_GROUPS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
# Family → in which layouts it is published.
LAYOUTS = [
    ("gemma4_text", "nvfp4"),
    ("gemma4_text", "packed"),
    ("minimax_m2", "fp8_blocks"),
    ("mimo_v2_flash", "fp8_blocks"),
    ("hy_v3", "fp8_blocks"),
    ("laguna", "nvfp4"),
    ("laguna", "packed"),
    ("llama4_text", "fp8_channel"),
    ("lfm2_moe", "fp8_blocks"),
    ("nemotron_h", "fp8_blocks"),  # whose experts become numbers
]


def load(folder: Path) -> CausalLM:
    config = read_folder(folder)
    return load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, exact=True)  # type: ignore[return-value]


def logits_of(model: CausalLM) -> list[Tensor]:
    return PagedRunner(model, sequences()).run(WHOLE)


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of one tensor as tensors of their own, as libraries that quantise write them."""
    found = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            found[name] = tensor
            continue
        transposed = ".feed_forward." in name
        for expert, matrix in enumerate(tensor.transpose(1, 2) if transposed else tensor):
            parts = {"down_proj": matrix}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            found |= {f"{path}.{expert}.{part}.weight": rows.contiguous() for part, rows in parts.items()}
    return found


@pytest.mark.parametrize(("family", "kind"), LAYOUTS)
def test_a_published_layout_is_served_as_what_its_codes_mean(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, kind: str
) -> None:
    source = shutil.copytree(tiny_model(family, max_position_embeddings=64, **WHOLE_GROUPS), tmp_path / "source")
    tensors = one_by_one(load_file(source / "model.safetensors"))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    folder = write(source, tmp_path, kind)
    model, twin = load(folder / "quantized"), load(folder / "twin")
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts and all(module.quantised for module in experts)
    assert difference(logits_of(model), logits_of(twin)) < 2e-3
    assert difference(logits_of(twin), oracle(tiny_model(family, max_position_embeddings=64, **WHOLE_GROUPS))) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_of_a_quantised_configuration(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Where no file says what is quantised, every module but vectors is."""
    folder = shutil.copytree(tiny_model(family), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_model(
        folder, read_folder(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64,
        load_format="dummy",
    )  # fmt: skip
    assert all(bool(row.isfinite().all()) for row in logits_of(model))  # type: ignore[arg-type]


def test_tables_of_tokens_are_not_quantised_at_load(tiny_model: Callable[..., Path]) -> None:
    folder = make(tiny_model, "gemma4_text")
    model = load_model(
        folder, read_folder(folder, quantization="int8"), dtype=torch.float32, device=torch.device("cpu"),
        max_model_len=64,
    )  # fmt: skip
    assert isinstance(model, CausalLM) and model.token_vectors is not None
    assert torch.equal(
        model.token_vectors.table.weight,
        load_file(folder / "model.safetensors")["model.embed_tokens_per_layer.weight"],
    )
    assert difference(logits_of(model), oracle(folder)) > 1e-4, "matrices are"


# Text inside of a model that sees: its class, model_type, and what names begin with in either dialect.
INSIDE = {
    "gemma4_text": ("Gemma4ForConditionalGeneration", "gemma4", "vision_tower.", "embed_vision."),
    "llama4_text": ("Llama4ForConditionalGeneration", "llama4", "vision_model.", "multi_modal_projector."),
}


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("family", INSIDE)
def test_the_text_half_of_a_model_that_sees(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, old: bool
) -> None:
    source = make(tiny_model, family)
    folder = shutil.copytree(source, tmp_path / "model")
    architecture, model_type, *beside = INSIDE[family]
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        inner = name.removeprefix("model.")
        if inner == name:
            tensors["language_model." + name if old else name] = tensor
        else:
            tensors[("language_model.model." if old else "model.language_model.") + inner] = tensor
    for name in beside:
        tensors[("" if old else "model.") + name + "weight"] = torch.zeros(3)
    if family == "gemma4_text":  # published with what a layer would need to make keys, which it does not
        prefix = "language_model.model." if old else "model.language_model."
        tensors[prefix + "layers.4.self_attn.k_proj.weight"] = torch.zeros(32, 64)
        tensors[prefix + "layers.4.self_attn.k_norm.weight"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    outer = {"architectures": [architecture], "model_type": model_type, "text_config": text, "dtype": "float32"}
    outer["tie_word_embeddings"] = text["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(outer))
    assert read_folder(folder).architecture == architecture
    assert difference(logits_of(load(folder)), oracle(source)) < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_parameters_as_transformers_has(tiny_model: Callable[..., Path], family: str) -> None:
    folder = tiny_model(family)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    buffers = [
        buffer
        for name, buffer in theirs.named_buffers()
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))
    ]
    assert count_parameters(read_folder(folder)) == sum(tensor.numel() for tensor in (*theirs.parameters(), *buffers))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_missing_keys_are_what_transformers_writes_of_them(tmp_path: Path, family: str) -> None:
    raw = {"model_type": family, "dtype": "float32"}
    if family == "gemma4_text":
        raw |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    if family == "granitemoehybrid":  # which would have no attention
        raw |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {**written, **raw} != raw
    assert parse_model_config(written) == parse_model_config(raw)


_E2B = {
    "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0, "dtype": "bfloat16",
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}  # fmt: skip


def test_what_gemma_4_keeps_of_a_token() -> None:
    """Of E2B's 35 layers 15 keep keys and values, 12 of them for 512 tokens; the others' MLPs are twice as wide."""
    config = parse_model_config(_E2B)
    assert [(spec.num_kv_heads, spec.head_dim, spec.window) for spec in config.kv_specs()] == (
        [(1, 256, 512)] * 4 + [(1, 512, 0)]
    ) * 3
    assert [layer.mlp.inner for layer in config.layers] == [6144] * 15 + [12288] * 20
    assert config.frame.logit_cap == 30.0 and config.layers[0].token_vector == 256
    large = {
        "model_type": "gemma4_text", "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "sliding_window": 1024, "use_bidirectional_attention": "vision",
    }  # fmt: skip
    specs = parse_model_config(large).kv_specs()
    assert [spec for spec in specs if not spec.window] == [replace(specs[5], num_kv_heads=4, head_dim=512)] * 10


def test_minimax_m2_and_mimo_as_their_files_say_it() -> None:
    """Keys that the hub's config.json has, and transformers' does not write."""
    m2 = parse_model_config({"model_type": "minimax_m2", "rotary_dim": 64, "head_dim": 128, "num_mtp_modules": 3})
    assert {layer.attention.rotary_dim for layer in m2.layers} == {64}
    assert "model.layers.62." in m2.ignored
    mimo = parse_model_config({
        "model_type": "mimo_v2_flash", "num_hidden_layers": 7, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1], "sliding_window_size": 128, "sliding_window": 128,
        "swa_num_key_value_heads": 8, "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
        "routed_scaling_factor": None, "n_shared_experts": None, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    })  # fmt: skip
    assert [layer.attention.window for layer in mimo.layers] == [0, 129, 129, 129, 129, 0, 129]
    assert [layer.attention.num_kv_heads for layer in mimo.layers] == [4, 8, 8, 8, 8, 4, 8]
    assert [isinstance(layer.mlp, MoESpec) for layer in mimo.layers] == [False] + [True] * 6
    assert {(layer.attention.rope.theta, layer.attention.rotary_dim) for layer in mimo.layers} == {
        (5e6, 64), (1e4, 64)
    }  # fmt: skip
    assert mimo == replace(parse_model_config({"model_type": "mimo_v2_flash", "num_hidden_layers": 7}))


def test_without_windows_layers_still_read_the_layer_of_their_kind(tiny_model: Callable[..., Path]) -> None:
    """--disable-sliding-window, in a context in which no window would hide anything."""
    folder = make(tiny_model, "gemma4_text", variant="gqa")
    config = without_windows(read_folder(folder))
    assert config.longest == 8
    model = load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    short = [sequence[:8] for sequence in sequences()]
    found = PagedRunner(model, short).run([["|", (0, 5), (1, 3)]])  # type: ignore[arg-type]
    assert difference(found, [rows[:8] for rows in oracle(folder)]) < 2e-4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 30}, "num_kv_shared_layers is 30"),
        ({"model_type": "gemma4_text", "enable_moe_block": True}, "top_k_experts or moe_intermediate_size is missing"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"model_type": "llama4_text", "num_experts_per_tok": 2}, "num_experts_per_tok is 2, supported is 1"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 48 layers"),
        ({"model_type": "laguna", "gating": "x"}, "gating is 'x'"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [7] * 40}, "multiple of num_key_value_heads 8"),
        ({"model_type": "minimax_m2", "scoring_func": "softmax"}, "scoring_func is 'softmax', supported is sigmoid"),
        ({"model_type": "hy_v3", "mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 80 layers"),
    ],
)
def test_configurations_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config(keys)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_layers_that_read_others_are_divided_and_not_cut_into_stages() -> None:
    config: ModelConfig = parse_model_config(_E2B)
    check_divides(config, 2)
    with pytest.raises(ModelError, match="--pipeline-parallel-size 2: layers of Gemma4ForCausalLM read what others"):
        check_stages(config, 2)


def test_experts_of_what_drafts_say_nothing_of_those_that_are_loaded() -> None:
    """Qwen 3.5 has stacked ones, and of its drafting layer single ones."""
    raw = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "dtype": "float32"}
    config = parse_model_config(raw)
    spec = next(layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec))
    shapes = {
        "model.layers.0.mlp.experts.gate_up_proj": (256, 2 * spec.inner, config.hidden_size),
        "model.layers.0.mlp.experts.down_proj": (256, config.hidden_size, spec.inner),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": (spec.inner, config.hidden_size),
    }
    found = with_stored_experts(config, shapes)
    assert {layer.mlp.stored for layer in found.layers if isinstance(layer.mlp, MoESpec)} == {"stacked"}
    turned = {name: (shape[0], *shape[:0:-1]) if len(shape) == 3 else shape for name, shape in shapes.items()}
    found = with_stored_experts(config, turned)
    assert {layer.mlp.stored for layer in found.layers if isinstance(layer.mlp, MoESpec)} == {"transposed"}


def test_the_direction_of_stacked_experts_where_one_matrix_is_square() -> None:
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    config = parse_model_config(raw)
    for stored, down in (("stacked", (4, 128, 64)), ("transposed", (4, 64, 128))):
        names = ("gate_up_proj", (4, 128, 128)), ("down_proj", down)
        found = with_stored_experts(config, {f"model.layers.0.mlp.experts.{name}": shape for name, shape in names})
        assert {layer.mlp.stored for layer in found.layers if isinstance(layer.mlp, MoESpec)} == {stored}


def test_other_spellings_of_published_configurations() -> None:
    scout = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attn_temperature_tuning": 4}
    assert any(layer.attention.temperature for layer in parse_model_config(scout).layers if layer.attention)
    mimo = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "rope_theta": 1e7}
    for given in ({"rope_scaling": {"type": "default"}}, {"rope_parameters": {"rope_type": "default"}}):
        thetas = [layer.attention.rope.theta for layer in parse_model_config(mimo | given).layers]
        assert set(thetas) == {1e7, 1e4} and thetas[0] == 1e7
    with pytest.raises(
        ModelError, match=r"layernorm_epsilon is 0\.001, and rms_norm_eps, which is read, another number"
    ):
        parse_model_config(mimo | {"layernorm_epsilon": 1e-3})
    laguna = {"architectures": ["LagunaForCausalLM"], "model_type": "laguna"}
    with pytest.raises(ModelError, match="an object with full_attention and sliding_attention belongs there"):
        parse_model_config(laguna | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    with pytest.raises(ModelError, match="swa_attention_sink_enabled is set, which is not supported"):
        parse_model_config(laguna | {"swa_attention_sink_enabled": True})
