"""EXAONE 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama, olmo
from .family import Family, attention_spec, mlp_spec, windows_of
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """OLMo 2 with a norm on every query and key head. Where there are windows, the layers without are not rotated."""
    attention, mlp = replace(attention_spec(raw), qk_norm="head"), mlp_spec(raw)
    pattern = raw.get("sliding_window_pattern")  # "LLLG" is 4
    every = len(pattern) if isinstance(pattern, str) and pattern else raw.size("sliding_window_pattern") or 1
    full = attention if raw.optional_count("sliding_window") is None else replace(attention, rope=None)
    return tuple(
        LayerSpec(replace(attention, window=window) if window else full, mlp, norms="post")
        for window in windows_of(raw, full_every=every)
    )


EXAONE4 = Family("Exaone4ForCausalLM", "exaone4", DEFAULTS, layers, names=olmo.NAMES)
