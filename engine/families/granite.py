"""Granite 3, dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import llama
from .family import Family
from .layer_spec import FrameSpec, LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with a scale of its own for scores, and one for what is added to the residual stream."""
    scale, residual = raw.number("attention_multiplier"), raw.number("residual_multiplier")
    return tuple(
        replace(layer, attention=replace(layer.attention, scale=scale), residual_scale=residual)
        for layer in llama.layers(raw)
    )


def frame(raw: RawConfig) -> FrameSpec:
    return FrameSpec(embedding_scale=raw.number("embedding_multiplier"), logit_scale=1.0 / raw.number("logits_scaling"))


GRANITE = Family("GraniteForCausalLM", "granite", DEFAULTS, layers, frame)
