"""Command R and R+ of 2024."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import AttentionSpec, FrameSpec, LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("mlp_bias", "rms_norm_eps")},
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "eos_token_id": 255001,
    "logit_scale": 0.0625,
    "rope_theta": 500_000.0,
    "use_qk_norm": False,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Attention and MLP side by side behind one LayerNorm; heads rotated by neighbours, in R+ each normed before."""
    attention = attention_of(raw)
    if raw.get("use_qk_norm"):
        attention = replace(attention, qk_norm="each")
    return (LayerSpec(attention, mlp_spec(raw), norms="parallel"),) * layer_count(raw)


def attention_of(raw: RawConfig) -> AttentionSpec:
    return replace(attention_spec(raw, bias=bool(raw.get("attention_bias"))), interleaved=True)


def frame(raw: RawConfig) -> FrameSpec:
    return FrameSpec("layer", logit_scale=raw.optional_number("logit_scale") or 1.0)


COHERE = Family("CohereForCausalLM", "cohere", DEFAULTS, layers, frame, norm_eps="layer_norm_eps")
