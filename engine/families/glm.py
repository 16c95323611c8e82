"""GLM-4 9B of 2024, and GLM-4 of April 2025."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "eos_token_id": (151329, 151336, 151338),
    "attention_bias": True,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with a bias on q, k and v, half of each head rotated by neighbours, gate and up in one matrix."""
    bias = bool(raw.get("attention_bias"))
    attention = replace(attention_spec(raw, rotated=0.5), qkv_bias=bias, interleaved=True)
    return (LayerSpec(attention, replace(mlp_spec(raw), fused=True)),) * layer_count(raw)


def layers_of_2025(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """The same with norms after attention and MLP, too."""
    return tuple(replace(layer, norms="both") for layer in layers(raw))


GLM = Family("GlmForCausalLM", "glm", DEFAULTS, layers)
GLM4 = Family("Glm4ForCausalLM", "glm4", DEFAULTS, layers_of_2025)
