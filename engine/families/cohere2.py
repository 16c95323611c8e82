"""Command R7B and A, Aya of the same shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import cohere
from .family import Family, mlp_spec, windows_of
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in cohere.DEFAULTS.items() if key not in ("rope_theta", "use_qk_norm")},
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Command R with a window in three layers of four; the fourth sees everything, and is not rotated."""
    attention, mlp = cohere.attention_of(raw), mlp_spec(raw)
    return tuple(
        LayerSpec(replace(attention, window=window, rope=attention.rope if window else None), mlp, norms="parallel")
        for window in windows_of(raw, full_every=raw.count("sliding_window_pattern"))
    )


COHERE2 = Family("Cohere2ForCausalLM", "cohere2", DEFAULTS, layers, cohere.frame, norm_eps="layer_norm_eps")
