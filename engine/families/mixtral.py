"""Mixtral 8x7B, 8x22B, and the models merged of Mistrals in its shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import mistral
from .family import Family, attention_spec, expert_counts, layer_count, mlp_spec
from .layer_spec import LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **mistral.DEFAULTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
NAMES = (
    (".mlp.router", ".block_sparse_moe.gate"),
    (".mlp.experts", ".block_sparse_moe.experts"),
    (".gate_proj", ".w1"),
    (".up_proj", ".w3"),
    (".down_proj", ".w2"),
)


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Mistral with experts in place of every MLP: weights are a softmax's, divided by the sum of what was chosen."""
    attention = replace(attention_spec(raw), window=raw.optional_count("sliding_window") or 0)
    num_experts, top_k = expert_counts(raw, "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=True)
    return (LayerSpec(attention, MoESpec(mlp_spec(raw).inner, routing)),) * layer_count(raw)


MIXTRAL = Family("MixtralForCausalLM", "mixtral", DEFAULTS, layers, names=NAMES)
