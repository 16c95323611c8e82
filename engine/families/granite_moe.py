"""Granite 3's mixtures, with a shared expert or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import granite
from .family import Family, attention_spec, expert_counts, layer_count, mlp_spec
from .layer_spec import LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **granite.DEFAULTS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}
NAMES = (
    (".mlp.router", ".block_sparse_moe.router.layer"),
    (".mlp.experts", ".block_sparse_moe"),
    (".mlp.shared_expert.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.shared_expert.down_proj", ".shared_mlp.output_linear"),
)


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with multipliers, and experts weighted by a softmax over those that were chosen."""
    attention = replace(
        attention_spec(raw, bias=bool(raw.get("attention_bias"))), scale=raw.number("attention_multiplier")
    )
    num_experts, top_k = expert_counts(raw, "num_local_experts")
    mixture = MoESpec(
        mlp_spec(raw).inner,
        RoutingSpec(num_experts, top_k, score="none", softmax_chosen=True),
        shared_inner=raw.size("shared_intermediate_size"),
        shared_fused=True,
        stored="stacked",
        stacked_names=("input_linear.weight", "output_linear.weight"),
    )
    return (LayerSpec(attention, mixture, residual_scale=raw.number("residual_multiplier")),) * layer_count(raw)


GRANITE_MOE = Family("GraniteMoeForCausalLM", "granitemoe", DEFAULTS, layers, granite.frame, names=NAMES)
GRANITE_MOE_SHARED = Family(
    "GraniteMoeSharedForCausalLM", "granitemoeshared", DEFAULTS, layers, granite.frame, names=NAMES
)
