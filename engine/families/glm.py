"""GLM 4: dense of 2024 and 2025, and the mixtures from 4.5 on."""

from __future__ import annotations

from dataclasses import replace

from . import deepseek
from .deepseek import sigmoid_layers
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig


def glm_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with a bias on q, k and v, half of each head rotated by neighbours, gate and up in one matrix."""
    bias = bool(raw.get("attention_bias"))
    attention = replace(attention_spec(raw, rotated=0.5), qkv_bias=bias, interleaved=True)
    return (LayerSpec(attention, replace(mlp_spec(raw), fused=True)),) * layer_count(raw)


def glm4_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """The same with norms after attention and MLP, too."""
    return tuple(replace(layer, norms="both") for layer in glm_layers(raw))


_ENDS = {"eos_token_id": (151329, 151336, 151338)}
GLM = Family("GlmForCausalLM", "glm", glm_layers, own=_ENDS)
GLM4 = Family("Glm4ForCausalLM", "glm4", glm4_layers, own=_ENDS)


def glm4_moe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with half of each head rotated, biases on q, k and v and norms on q and k by the config; then DeepSeek-V3's
    experts in all layers but the first."""
    attention = replace(
        attention_spec(raw, rotated=0.5),
        qkv_bias=bool(raw.get("attention_bias")),
        qk_norm="head" if raw.get("use_qk_norm") else "",
    )
    return sigmoid_layers(raw, attention)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    glm4_moe_layers,
    own=deepseek.EXPERTS,
    names=deepseek.NAMES,
    drafts=deepseek.DRAFTS,
)
