"""Qwen 3, dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import qwen2
from .family import Family, attention_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {**qwen2.DEFAULTS, "head_dim": 128}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 2 with an RMS norm on every query and key head before the rotation, and biases only by the config."""
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    return qwen2.with_windows(raw, replace(attention, qk_norm="head"))


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", DEFAULTS, layers)
