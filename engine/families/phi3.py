"""Phi-3, Phi-3.5 and Phi-4, those of text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig
from .rope_config import read_rope

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "eos_token_id": 32000,
    "sliding_window": None,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with q, k, v in one matrix, gate and up in another, a window in every layer where the config has one, and
    a part of each head rotated."""
    original = {"original_max_position_embeddings": raw.count("original_max_position_embeddings")}
    rope = read_rope({**raw.values, **original}, raw.count("max_position_embeddings"), aliases={"yarn": "longrope"})
    window = raw.optional_count("sliding_window") or 0
    attention = replace(attention_spec(raw, rope=rope, rotated=1.0), fused=True, window=window)
    return (LayerSpec(attention, replace(mlp_spec(raw), fused=True)),) * layer_count(raw)


PHI3 = Family("Phi3ForCausalLM", "phi3", DEFAULTS, layers)
