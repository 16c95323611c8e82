"""Gemma 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import gemma
from .family import Family, attention_spec, mlp_spec, windows_of
from .layer_spec import AttentionSpec, FrameSpec, LayerSpec
from .raw_config import RawConfig
from .rope_config import RopeConfig

DEFAULTS: dict[str, Any] = {
    **gemma.DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
NAMES = (
    ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_mlp_layernorm", "post_feedforward_layernorm"),
)


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Gemma with norms before and after attention and MLP, capped scores, and a window in every other layer."""
    attention, mlp = attention_of(raw), mlp_spec(raw, "hidden_activation", activations=gemma.GELU)
    windows = windows_of(raw, full_every=2)
    return tuple(LayerSpec(replace(attention, window=window), mlp, norms="both") for window in windows)


def attention_of(raw: RawConfig, rope: RopeConfig | None = None) -> AttentionSpec:
    """Of a layer without a window."""
    return replace(
        attention_spec(raw, bias=bool(raw.get("attention_bias")), rope=rope),
        scale=raw.number("query_pre_attn_scalar") ** -0.5,
        soft_cap=raw.optional_number("attn_logit_softcapping") or 0.0,
    )


def frame(raw: RawConfig) -> FrameSpec:
    """Gemma's, and capped logits."""
    return replace(gemma.frame(raw), logit_cap=raw.optional_number("final_logit_softcapping") or 0.0)


GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", DEFAULTS, layers, frame, names=NAMES)
