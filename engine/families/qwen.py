"""Qwen 2, 2.5, QwQ and 3, and the mixtures of both."""

from __future__ import annotations

from dataclasses import replace

from .family import (
    Family,
    attention_spec,
    dense_or_mixture,
    expert_counts,
    layer_count,
    mlp_spec,
    named_windows,
    window_of,
)
from .layer_spec import AttentionSpec, LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig


def qwen2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with a bias on q, k and v, always, and a window in the layers for which it is switched on."""
    return with_windows(raw, replace(attention_spec(raw), qkv_bias=True))


def with_windows(raw: RawConfig, attention: AttentionSpec) -> tuple[LayerSpec, ...]:
    """Layers of this attention: with use_sliding_window, those that layer_types names, or those from max_window_layers
    on, have a window."""
    mlp = mlp_spec(raw)
    return tuple(LayerSpec(replace(attention, window=window), mlp) for window in _dense_windows(raw, layer_count(raw)))


def _dense_windows(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    window, first = window_of(raw), raw.size("max_window_layers")
    return named_windows(raw, window, "use_sliding_window and sliding_window") or tuple(
        window if index >= first else 0 for index in range(num_layers)
    )


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", qwen2_layers)


def qwen3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 2 with an RMS norm on every query and key head before the rotation, and biases only by the config."""
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    return with_windows(raw, replace(attention, qk_norm="head"))


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", qwen3_layers)


ROUTER_NAMES = ((".mlp.router", ".mlp.gate"),)


def qwen3_moe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 3's attention; experts weighted by a softmax over all of them, whose chosen part sums to 1 if the config
    says so; some layers may be dense."""
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    window = window_of(raw)
    attention = replace(attention, qk_norm="head", window=window)
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=bool(raw.get("norm_topk_prob")))
    mixture = MoESpec(raw.count("moe_intermediate_size"), routing)
    return tuple(LayerSpec(attention, mlp) for mlp in dense_or_mixture(raw, mixture))


QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe_layers, names=ROUTER_NAMES)


def qwen2_moe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 2's attention; experts as Qwen 3's, and a shared one whose result is gated."""
    attention = replace(attention_spec(raw), qkv_bias=bool(raw.get("qkv_bias")))
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=bool(raw.get("norm_topk_prob")))
    inner, shared = raw.count("moe_intermediate_size"), raw.count("shared_expert_intermediate_size")
    mixture = MoESpec(inner, routing, shared, shared_gate=True)
    return tuple(
        LayerSpec(replace(attention, window=window), mlp)
        for window, mlp in zip(_mixture_windows(raw), dense_or_mixture(raw, mixture), strict=True)
    )


def _mixture_windows(raw: RawConfig) -> tuple[int, ...]:
    """Of each layer, 0: none. Where they are on and layer_types does not say it, every other of the first
    max_window_layers layers has one."""
    window, last = window_of(raw), raw.size("max_window_layers")
    named = named_windows(raw, window) if window else None
    return named or tuple(window if index % 2 == 0 and index < last else 0 for index in range(layer_count(raw)))


QWEN2_MOE = Family("Qwen2MoeForCausalLM", "qwen2_moe", qwen2_moe_layers, names=ROUTER_NAMES)
