"""Gemma 1, 2 and 3."""

from __future__ import annotations

from dataclasses import replace

from .family import Family, attention_spec, layer_count, mlp_spec, windows_of
from .layer_spec import Activation, AttentionSpec, FrameSpec, LayerSpec
from .raw_config import RawConfig
from .rope_config import RopeConfig, read_ropes
from .towers import gemma3_vision

GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def gemma_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with GeGLU. What its files call "gelu" has always been computed with the tanh."""
    mlp = mlp_spec(raw, activations=GELU | {"gelu": "gelu_tanh"})
    return (LayerSpec(attention_spec(raw, bias=bool(raw.get("attention_bias"))), mlp),) * layer_count(raw)


def gemma_frame(raw: RawConfig) -> FrameSpec:
    """Weights of norms are stored less one; embeddings are multiplied by the root of their length."""
    return FrameSpec("rms_less_one", embedding_scale=raw.count("hidden_size") ** 0.5)


GEMMA = Family("GemmaForCausalLM", "gemma", gemma_layers, gemma_frame)


NAMES = (
    ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_mlp_layernorm", "post_feedforward_layernorm"),
)


def gemma2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Gemma with norms before and after attention and MLP, capped scores, and a window in every other layer."""
    attention, mlp = gemma2_attention(raw), mlp_spec(raw, "hidden_activation", activations=GELU)
    windows = windows_of(raw, full_every=2)
    return tuple(LayerSpec(replace(attention, window=window), mlp, norms="both") for window in windows)


def gemma2_attention(raw: RawConfig, rope: RopeConfig | None = None) -> AttentionSpec:
    """Of a layer without a window."""
    return replace(
        attention_spec(raw, bias=bool(raw.get("attention_bias")), rope=rope),
        scale=raw.number("query_pre_attn_scalar") ** -0.5,
        soft_cap=raw.optional_number("attn_logit_softcapping") or 0.0,
    )


def gemma2_frame(raw: RawConfig) -> FrameSpec:
    """Gemma's, and capped logits."""
    return replace(gemma_frame(raw), logit_cap=raw.optional_number("final_logit_softcapping") or 0.0)


GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", gemma2_layers, gemma2_frame, names=NAMES)


def gemma3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Gemma 2 with a norm on every query and key head, and one layer in six without a window, which is rotated in its
    own way."""
    full, sliding = read_ropes(
        raw.values, raw.count("max_position_embeddings"), raw.default_theta, raw.number("rope_local_base_freq")
    )
    attention = replace(gemma2_attention(raw, full), qk_norm="head", soft_cap=0.0)  # whatever the config says of it
    mlp = mlp_spec(raw, "hidden_activation", activations=GELU)
    windows = windows_of(raw, full_every=raw.count("sliding_window_pattern"))
    if raw.values.get("use_bidirectional_attention") is True:  # half of it on each side
        windows = tuple(window // 2 + 1 if window else 0 for window in windows)
    return tuple(
        LayerSpec(replace(attention, window=window, rope=sliding if window else full), mlp, norms="both")
        for window in windows
    )


_GEMMA3_OWN = {"sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0}
GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", gemma3_layers, gemma2_frame, own=_GEMMA3_OWN, names=NAMES)
GEMMA3_PICTURES = Family(
    "Gemma3ForConditionalGeneration", "gemma3", gemma3_layers, gemma2_frame,
    own=_GEMMA3_OWN,
    nested="text_config",
    names=(*NAMES, ("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    other_names=((*NAMES, ("model.", "model.language_model.")),),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    vision=gemma3_vision,
)  # fmt: skip
