"""Seed-OSS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with biases of q, k and v, and of the output, each by its own key."""
    attention = replace(
        attention_spec(raw),
        qkv_bias=bool(raw.get("attention_bias")),
        output_bias=bool(raw.get("attention_out_bias")),
    )
    return (LayerSpec(attention, mlp_spec(raw, bias=bool(raw.get("mlp_bias")))),) * layer_count(raw)


SEED_OSS = Family("SeedOssForCausalLM", "seed_oss", DEFAULTS, layers)
