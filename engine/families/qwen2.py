"""Qwen 2 and 2.5, QwQ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec, named_windows, window_of
from .layer_spec import AttentionSpec, LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with a bias on q, k and v, always, and a window in the layers for which it is switched on."""
    return with_windows(raw, replace(attention_spec(raw), qkv_bias=True))


def with_windows(raw: RawConfig, attention: AttentionSpec) -> tuple[LayerSpec, ...]:
    """Layers of this attention: with use_sliding_window, those that layer_types names, or those from max_window_layers
    on, have a window."""
    mlp = mlp_spec(raw)
    return tuple(LayerSpec(replace(attention, window=window), mlp) for window in _windows(raw, layer_count(raw)))


def _windows(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    window, first = window_of(raw), raw.size("max_window_layers")
    return named_windows(raw, window, "use_sliding_window and sliding_window") or tuple(
        window if index >= first else 0 for index in range(num_layers)
    )


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", DEFAULTS, layers)
