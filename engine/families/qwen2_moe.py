"""Qwen 1.5's and 2's mixtures: Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import qwen3_moe
from .family import Family, attention_spec, dense_or_mixture, expert_counts, layer_count, named_windows, window_of
from .layer_spec import LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **qwen3_moe.DEFAULTS,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "max_window_layers": 28,
    "layer_types": None,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 2's attention; experts as Qwen 3's, and a shared one whose result is gated."""
    attention = replace(attention_spec(raw), qkv_bias=bool(raw.get("qkv_bias")))
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=bool(raw.get("norm_topk_prob")))
    inner, shared = raw.count("moe_intermediate_size"), raw.count("shared_expert_intermediate_size")
    mixture = MoESpec(inner, routing, shared, shared_gate=True)
    return tuple(
        LayerSpec(replace(attention, window=window), mlp)
        for window, mlp in zip(_windows(raw), dense_or_mixture(raw, mixture), strict=True)
    )


def _windows(raw: RawConfig) -> tuple[int, ...]:
    """Of each layer, 0: none. Where they are on and layer_types does not say it, every other of the first
    max_window_layers layers has one."""
    window, last = window_of(raw), raw.size("max_window_layers")
    named = named_windows(raw, window) if window else None
    return named or tuple(window if index % 2 == 0 and index < last else 0 for index in range(layer_count(raw)))


QWEN2_MOE = Family("Qwen2MoeForCausalLM", "qwen2_moe", DEFAULTS, layers, names=qwen3_moe.NAMES)
