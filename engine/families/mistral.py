"""Mistral 7B and its successors of the same shape (Nemo, Small)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama without biases, and with a sliding window in every layer, where the config sets one."""
    attention = replace(attention_spec(raw), window=raw.optional_count("sliding_window") or 0)
    return (LayerSpec(attention, mlp_spec(raw)),) * layer_count(raw)


MISTRAL = Family("MistralForCausalLM", "mistral", DEFAULTS, layers)
