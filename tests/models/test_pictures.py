"""The text half of models of pictures: transformers' logits, under every name that its parts have in files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from vserve.engine.describe.reading import parse_model_config, read_folder, read_model_config
from vserve.engine.errors import ModelError
from vserve.engine.families import pictures
from vserve.engine.families.layer_spec import LatentAttentionSpec, MoESpec
from vserve.engine.options.config import EngineConfig

from ..quant.checkpoints import write
from ..tiny_models import DEEPSEEK, FAMILIES, PICTURES
from .test_model_parity import CHUNKED, PagedRunner, difference, load, oracle, sequences

SIZES: dict[str, Any] = {"max_position_embeddings": 64}
# Names of the decoder and of the output matrix, in files of transformers today, before 4.52, and of Qwen 2 VL.
NEW = {"decoder": "model.language_model.", "head": "lm_head.", "tower": "model.vision_tower.",
    "projector": "model.multi_modal_projector."}  # fmt: skip
OLD = {"decoder": "language_model.model.", "head": "language_model.lm_head.", "tower": "vision_tower.",
    "projector": "multi_modal_projector."}  # fmt: skip
BARE = {"decoder": "model.", "head": "lm_head.", "tower": "visual.", "projector": "mm_projector."}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OTHERS = {  # beside what PICTURES says of the text
    "Mistral Small 3": ("mistral3", {"model_type": "mistral", "sliding_window": None, "rope_parameters": PLAIN}),
    "Mistral Small 4": ("mistral3", {"model_type": "mistral4", **FAMILIES["mistral4"]}),
    "InternVL of Qwen 2": ("internvl", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "InternVL of experts": ("internvl", {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]}),
    "InternVL of gpt-oss": ("internvl", {"model_type": "gpt_oss", **FAMILIES["gpt_oss"]}),
    "Pixtral": ("llava", {"model_type": "mistral", "sliding_window": None}),
    "OneVision of Llama": ("llava_onevision", {"model_type": "llama", "tie_word_embeddings": True}),
    "Qwen 2 VL, tied": ("qwen2_vl", {"tie_word_embeddings": True}),
    "Qwen 3 VL, tied": ("qwen3_vl", {"tie_word_embeddings": True}),
}


def logits_of(folder: Path) -> list[torch.Tensor]:
    return PagedRunner(load(folder), sequences()).run(CHUNKED)


@pytest.mark.parametrize("kind", PICTURES)
def test_logits_are_those_of_transformers(tiny_model: Callable[..., Path], kind: str) -> None:
    folder = tiny_model(kind, **SIZES)
    assert read_folder(folder).pictures
    assert difference(logits_of(folder), oracle(folder)) < 2e-4


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_text(tiny_model: Callable[..., Path], name: str) -> None:
    kind, keys = OTHERS[name]
    folder = tiny_model(kind, **SIZES | keys)
    assert difference(logits_of(folder), oracle(folder)) < 2e-4


def renamed(source: Path, folder: Path, to: Mapping[str, str], head: bool = True) -> Path:
    """A copy whose tensors are called so; head: with the output matrix."""
    shutil.copytree(source, folder)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        found = _parted(name)
        if found is None or (found[0] == "head" and not head):
            continue
        part, rest = found
        tensors[to[part] + rest] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _parted(name: str) -> tuple[str, str] | None:
    for dialect in (NEW, OLD, BARE):
        for part, begin in dialect.items():
            rest = name.removeprefix(begin)
            if name.startswith(begin) and (part != "decoder" or rest.startswith(("embed_tokens.", "layers.", "norm."))):
                return part, rest
    return None


@pytest.mark.parametrize("dialect", [NEW, OLD, BARE], ids=["new", "old", "bare"])
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl_moe", "kimi_k25"])
def test_names_in_files(tiny_model: Callable[..., Path], tmp_path: Path, kind: str, dialect: dict[str, str]) -> None:
    source = tiny_model(kind, **SIZES)
    assert difference(logits_of(renamed(source, tmp_path / "model", dialect)), oracle(source)) < 2e-4


def test_a_flat_config_describes_the_text_too(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Qwen 2 VL's, before transformers 4.52, with a type of rotation that it has no longer."""
    source = tiny_model("qwen2_5_vl", **SIZES)
    folder = renamed(source, tmp_path / "model", BARE)
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    (folder / "config.json").write_text(json.dumps({**text, **raw}))
    assert difference(logits_of(folder), oracle(source)) < 2e-4


def test_the_authors_names_of_internvl(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("internvl", **SIZES)
    folder = renamed(source, tmp_path / "model", OLD | {"tower": "vision_model."})
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config") | {"architectures": ["Qwen3ForCausalLM"]}
    raw |= {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": text}
    raw |= {"auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}, "dtype": None}
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_folder(folder)
    assert (config.architecture, config.dtype) == ("InternVLChatModel", torch.float32)
    assert difference(logits_of(folder), oracle(source)) < 2e-4
    changes = '{"llm_config": {"rms_norm_eps": 0.25}}'
    assert read_model_config(folder, EngineConfig(str(folder), hf_overrides=changes)).norm_eps == 0.25


def test_what_is_tied_though_config_json_does_not_say_so(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("internvl", **SIZES, tie_word_embeddings=True)
    folder = renamed(source, tmp_path / "model", OLD, head=False)
    raw = json.loads((folder / "config.json").read_text())
    del raw["tie_word_embeddings"]
    raw["text_config"].pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(raw))
    assert difference(logits_of(folder), oracle(source)) < 2e-4


def test_names_that_mistral_writes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("mistral4", **SIZES)
    folder = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    new: dict[str, torch.Tensor] = {}
    for name, experts in tuple(tensors.items()):
        if ".experts." in name:
            path, _, last = name.rpartition(".")
            gate, *rest = experts.chunk(2 if last == "gate_up_proj" else 1, 1)
            parts = {"gate_proj": gate, "up_proj": rest[0]} if rest else {"down_proj": gate}
            for part, of_all in parts.items():
                tensors |= {f"{path}.{index}.{part}.weight": one.clone() for index, one in enumerate(of_all)}
            del tensors[name]
    for name, tensor in tensors.items():
        for ours, theirs in (
            ("model.embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("model.", ""), ("self_attn", "attention"),
            ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"), ("mlp.gate.", "gate."),
            ("mlp.shared_experts", "shared_experts"), ("mlp.experts", "experts"), ("mlp", "feed_forward"),
            ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"), ("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"),
            ("q_a_layernorm", "q_a_norm"), ("kv_a_proj_with_mqa", "wkv_a_with_mqa"), ("kv_b_proj", "wkv_b"),
            ("kv_a_layernorm", "kv_a_norm"), ("o_proj", "wo"),
        ):  # fmt: skip
            name = name.replace(ours, theirs)
        new[name] = tensor
    save_file(new, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "mistral_large_3"}
    (folder / "config.json").write_text(json.dumps(raw))
    assert difference(logits_of(folder), oracle(source)) < 2e-4


@pytest.mark.parametrize(
    ("kind", "method"), [("qwen3_vl", "fp8_blocks"), ("qwen2_5_vl", "awq"), ("kimi_k25", "packed"), ("mistral3", "fp8")]
)
def test_published_quantisations(tiny_model: Callable[..., Path], tmp_path: Path, kind: str, method: str) -> None:
    """As each is published: Kimi's config.json says it beside the text."""
    sizes = {"moe_intermediate_size": 64, "q_lora_rank": 64, "v_head_dim": 16} if kind == "kimi_k25" else {}
    folder = write(tiny_model(kind, **SIZES, **sizes), tmp_path, method)
    if kind == "kimi_k25":
        file = folder / "quantized" / "config.json"
        raw = json.loads(file.read_text())
        raw["text_config"]["quantization_config"] = raw.pop("quantization_config")
        file.write_text(json.dumps(raw))
    found, expected = (logits_of(folder / name) for name in ("quantized", "twin"))
    assert read_folder(folder / "quantized").quantization is not None
    scale = torch.cat(expected).std()
    for ours, theirs in zip(found, expected, strict=True):
        # A product that is rounded may choose another expert.
        assert (ours - theirs).square().mean().sqrt() < (0.15 if kind == "kimi_k25" else 0.05) * scale


@pytest.mark.parametrize("family", pictures.PICTURES, ids=lambda family: family.architecture)
def test_defaults_of_missing_keys_are_transformers(family: Any) -> None:
    """And without a class, the model_type says it; what the text may be is told by its own."""
    text: dict[str, Any] = {"model_type": "llama"} if family.varied else {}
    text |= {"head_dim": 128} if family.model_type == "glm4v_moe" else {}  # which has no even half
    config = parse_model_config({"architectures": [family.architecture], family.nested: text})
    assert replace(parse_model_config({"model_type": family.model_type, family.nested: text}),
                   architecture=family.architecture) == config  # fmt: skip
    kind = "llama" if family.varied else family.like or family.model_type
    theirs = AutoConfig.for_model(kind).get_text_config()
    layer = config.layers[0]
    assert (config.vocab_size, config.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert len(config.layers) == theirs.num_hidden_layers and config.norm_eps == theirs.rms_norm_eps
    assert not isinstance(layer.attention, LatentAttentionSpec) and layer.attention.rope is not None
    assert layer.attention.rope.theta == theirs.rope_parameters["rope_theta"]
    assert layer.attention.num_kv_heads == theirs.num_key_value_heads
    experts = [spec.mlp for spec in config.layers if isinstance(spec.mlp, MoESpec)]
    assert bool(experts) == hasattr(theirs, "num_experts_per_tok")
    for spec in experts:
        assert spec.routing.top_k == theirs.num_experts_per_tok and spec.inner == theirs.moe_intermediate_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"architectures": ["Mamba2ForCausalLM"]}, "Mamba2ForCausalLM is not served: its layers keep a recurrent"),
        ({"architectures": ["InternLM2ForCausalLM"]}, "architecture InternLM2ForCausalLM is not supported"),
        ({"model_type": "qwen2_vl"}, "config.json: llm_config is of Qwen2VLForConditionalGeneration, which is no dec"),
    ],
)
def test_text_that_is_refused(text: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model_config({"architectures": ["InternVLChatModel"], "llm_config": text})


def test_layers_behind_the_last_are_left_out_under_every_name() -> None:
    text = {"model_type": "deepseek_v3", **DEEPSEEK, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    config = parse_model_config({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text})
    for dialect in (NEW, OLD, BARE):
        assert f"{dialect['decoder']}layers.2." in config.ignored


def test_what_the_start_says(tiny_model: Callable[..., Path]) -> None:
    config = read_folder(tiny_model("llava_next", **SIZES))
    (line,) = config.log_lines(text_is_enough=False)
    assert line.startswith("LlavaNextForConditionalGeneration: its text is served, a request with a picture is refused")
    assert not list(config.log_lines(text_is_enough=True))
