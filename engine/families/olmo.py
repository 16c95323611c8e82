"""OLMo 2 and 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec, windows_of
from .layer_spec import AttentionSpec, LayerSpec
from .raw_config import RawConfig
from .rope_config import RopeConfig, read_ropes

DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in llama.DEFAULTS.items() if key != "mlp_bias"},
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}
DEFAULTS3: dict[str, Any] = {**DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None}
# Norms stand after attention and MLP only, and one has the name that llama's before the MLP has.
NAMES = (
    ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_mlp_layernorm", "post_feedforward_layernorm"),
)


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with norms after attention and MLP in place of those before, and one over all queries and over all keys."""
    return (LayerSpec(_attention(raw), mlp_spec(raw), norms="post"),) * layer_count(raw)


def layers3(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """OLMo 2 with a window in three layers of four; only the fourth's rotation is stretched."""
    full, sliding = read_ropes(raw.values, raw.count("max_position_embeddings"), raw.default_theta)
    attention, mlp = _attention(raw, full), mlp_spec(raw)
    return tuple(
        LayerSpec(replace(attention, window=window, rope=sliding if window else full), mlp, norms="post")
        for window in windows_of(raw, full_every=4)
    )


def _attention(raw: RawConfig, rope: RopeConfig | None = None) -> AttentionSpec:
    return replace(attention_spec(raw, bias=bool(raw.get("attention_bias")), rope=rope), qk_norm="width")


OLMO2 = Family("Olmo2ForCausalLM", "olmo2", DEFAULTS, layers, names=NAMES)
OLMO3 = Family("Olmo3ForCausalLM", "olmo3", DEFAULTS3, layers3, names=NAMES)
