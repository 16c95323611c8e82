"""Gemma 3: models of text, and the text of those that see pictures too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import gemma, gemma2
from .family import Family, mlp_spec, windows_of
from .layer_spec import LayerSpec
from .raw_config import RawConfig
from .rope_config import read_ropes

DEFAULTS: dict[str, Any] = {
    **gemma2.DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Gemma 2 with a norm on every query and key head, and one layer in six without a window, which is rotated in its
    own way."""
    full, sliding = read_ropes(
        raw.values, raw.count("max_position_embeddings"), raw.default_theta, raw.number("rope_local_base_freq")
    )
    attention = replace(gemma2.attention_of(raw, full), qk_norm="head", soft_cap=0.0)  # whatever the config says of it
    mlp = mlp_spec(raw, "hidden_activation", activations=gemma.GELU)
    windows = windows_of(raw, full_every=raw.count("sliding_window_pattern"))
    if raw.values.get("use_bidirectional_attention") is True:  # half of it on each side
        windows = tuple(window // 2 + 1 if window else 0 for window in windows)
    return tuple(
        LayerSpec(replace(attention, window=window, rope=sliding if window else full), mlp, norms="both")
        for window in windows
    )


GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", DEFAULTS, layers, gemma2.frame, names=gemma2.NAMES)
GEMMA3_PICTURES = Family(
    "Gemma3ForConditionalGeneration", "gemma3", DEFAULTS, layers, gemma2.frame,
    nested="text_config",
    names=(*gemma2.NAMES, ("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    other_names=((*gemma2.NAMES, ("model.", "model.language_model.")),),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)  # fmt: skip
