"""OLMoE 1B-7B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama, qwen3_moe
from .family import Family, attention_spec, expert_counts, layer_count, mlp_spec
from .layer_spec import LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig, number

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 50279,
    "clip_qkv": None,
    "num_experts": 64,
    "num_local_experts": None,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with norms over all queries and over all keys, and experts in place of every MLP."""
    clip = 0.0 if raw.get("clip_qkv") is None else number(raw.values, "clip_qkv")
    attention = replace(attention_spec(raw, bias=bool(raw.get("attention_bias"))), qk_norm="width", clip=clip)
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=bool(raw.get("norm_topk_prob")))
    return (LayerSpec(attention, MoESpec(mlp_spec(raw).inner, routing)),) * layer_count(raw)


OLMOE = Family("OlmoeForCausalLM", "olmoe", DEFAULTS, layers, names=qwen3_moe.NAMES)
