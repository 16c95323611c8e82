"""SmolLM 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ModelError
from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec, named_windows, window_of
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "eos_token_id": 128001,
    "rope_theta": 2_000_000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with every fourth layer not rotated; those are the ones that may have a window."""
    count, every = layer_count(raw), raw.count("no_rope_layer_interval")
    rotated = raw.optional_list("no_rope_layers") or [
        (index + 1) % every != 0 for index in range(count)
    ]  # as it says: 1 is on
    if len(rotated) < count:
        raise ModelError(f"config.json: no_rope_layers has {len(rotated)} entries for {count} layers: correct the file")
    window = window_of(raw)
    windows = [0 if there else window for there in rotated[:count]]
    if window:
        windows = list(named_windows(raw, window) or windows)
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    mlp = mlp_spec(raw, bias=bool(raw.get("mlp_bias")))
    return tuple(
        LayerSpec(replace(attention, rope=attention.rope if there else None, window=window), mlp)
        for there, window in zip(rotated, windows, strict=False)
    )


SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", DEFAULTS, layers)
