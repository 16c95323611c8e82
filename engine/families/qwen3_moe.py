"""Qwen 3's mixtures: 30B-A3B, 235B-A22B, Qwen3-Coder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, dense_or_mixture, expert_counts, window_of
from .layer_spec import LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_local_experts": None,  # the same, as transformers 5 writes it
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
}
NAMES = ((".mlp.router", ".mlp.gate"),)


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 3's attention; experts weighted by a softmax over all of them, whose chosen part sums to 1 if the config
    says so; some layers may be dense."""
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    window = window_of(raw)
    attention = replace(attention, qk_norm="head", window=window)
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=bool(raw.get("norm_topk_prob")))
    mixture = MoESpec(raw.count("moe_intermediate_size"), routing)
    return tuple(LayerSpec(attention, mlp) for mlp in dense_or_mixture(raw, mixture))


QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", DEFAULTS, layers, names=NAMES)
