"""Llama 2, 3 and 3.x, and the many models that took their shape (Yi, SmolLM, TinyLlama, Vicuna, …)."""

from __future__ import annotations

from typing import Any

from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # None: as many as query heads
    "head_dim": None,  # None: hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """All alike; biases where the config has them."""
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    return (LayerSpec(attention, mlp_spec(raw, bias=bool(raw.get("mlp_bias")))),) * layer_count(raw)


LLAMA = Family("LlamaForCausalLM", "llama", DEFAULTS, layers)
# Trained further to read both ways; its classifiers say in "pooling" of what they make classes.
LLAMA_BOTH_WAYS = Family("LlamaBidirectionalForCausalLM", "llama_bidirec", DEFAULTS, layers, causal=False)
