"""Gemma 4: E2B, E4B, 26B-A4B, 31B, and 12B, which has no encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .family import Family, attention_spec, expert_counts, layer_count, mlp_spec, windows_of
from .gemma import GELU, NAMES
from .layer_spec import AttentionSpec, FrameSpec, LayerSpec, MLPSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig
from .rope_config import FULL, SLIDING, read_ropes

# transformers' rotations where config.json says nothing of them.
_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_PATTERN = 6  # each of so manieth layers has no window


def gemma4_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Gemma 3 whose layers without a window have heads of another size, and values that are made like the keys; values
    are normed; the last layers read what earlier ones keep. Experts stand beside the MLP. A number multiplies what each
    layer makes, after a product with a vector that the token has for the layer."""
    if raw.values.get("use_bidirectional_attention") == "all":
        raise ModelError(
            "config.json: use_bidirectional_attention is 'all', which is not computed for this architecture: use "
            "another model"
        )
    if not raw.values.get("rope_parameters"):
        raw = RawConfig({**raw.values, "rope_parameters": _ROPES}, raw.defaults)
    count, shared = layer_count(raw), raw.size("num_kv_shared_layers")
    windows = [*windows_of(raw, _PATTERN)[:-1], 0]  # the last one never has one
    first = count - shared
    if shared and {bool(window) for window in windows[: max(0, first)]} != {bool(window) for window in windows}:
        raise ModelError(
            f"config.json: num_kv_shared_layers is {shared}, and of layers with a window, or without, the other "
            f"{max(0, first)} have none whose keys and values could be read: correct the file"
        )
    full_rope, sliding_rope = read_ropes(raw.values, raw.count("max_position_embeddings"), raw.default_theta)
    sliding = _attention(raw, rope=sliding_rope)
    full = _attention(_of_full_layers(raw, windows), rope=full_rope)
    full = replace(full, keys_are_values=bool(raw.get("attention_k_eq_v")))
    mlp = mlp_spec(raw, "hidden_activation", activations=GELU)
    wide = replace(mlp, inner=2 * mlp.inner) if raw.get("use_double_wide_mlp") else mlp
    vector = raw.size("hidden_size_per_layer_input")

    def layer(index: int) -> LayerSpec:
        reads, window = index >= first, windows[index]
        attention = replace(sliding, window=window) if window else full
        dense = wide if reads else mlp
        if reads:
            attention = replace(attention, reads_earlier=True, value_norm=False, keys_are_values=False)
        both = _beside(raw, dense) if raw.get("enable_moe_block") else dense
        return LayerSpec(attention, both, norms="both", token_vector=vector, scaled=True)

    return tuple(layer(index) for index in range(count))


def _attention(raw: RawConfig, **settings: Any) -> AttentionSpec:
    spec = attention_spec(raw, bias=bool(raw.get("attention_bias")), **settings)
    return replace(spec, qk_norm="head", value_norm=True, scale=1.0)


def _of_full_layers(raw: RawConfig, windows: list[int]) -> RawConfig:
    """With the heads of layers without a window, in one of two spellings: for all of them, or of each."""
    keys = raw.optional_count("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
    heads: Any = {"head_dim": raw.count("global_head_dim")}
    if keys is not None:
        heads["num_key_value_heads"] = keys
    if (each := raw.values.get("per_layer_config")) is not None:
        each = each if isinstance(each, dict) else {}
        by_layer = {int(key): value for key, value in each.items() if str(key).isdecimal()}  # "5", or "05"
        found = [by_layer.get(index) for index, window in enumerate(windows) if not window]
        heads = found[0]
        if not all(isinstance(one, dict) and one == heads for one in found):
            raise ModelError(
                "config.json: per_layer_config has other heads for each layer without a window, read are the same for "
                "all of them: use another model"
            )
    return RawConfig({**raw.values, **heads}, raw.defaults)


def _beside(raw: RawConfig, dense: MLPSpec) -> MoESpec:
    """Experts weighted by a softmax, the chosen to a sum of 1, beside a dense MLP."""
    raw = RawConfig({**raw.values, "num_experts_per_tok": raw.get("top_k_experts")}, raw.defaults)
    if raw.values["num_experts_per_tok"] is None or raw.get("moe_intermediate_size") is None:
        raise ModelError(
            "config.json: enable_moe_block is set, and top_k_experts or moe_intermediate_size is missing: add it"
        )
    num_experts, top_k = expert_counts(raw, "num_experts")
    return MoESpec(
        raw.count("moe_intermediate_size"),
        RoutingSpec(num_experts, top_k, renormalize=True, fp32=True),
        dense.inner,
        activation="gelu_tanh",
        apart=True,
        stored="stacked",
    )


def gemma4_frame(raw: RawConfig) -> FrameSpec:
    """Gemma 2's, with norms whose weights are stored as they are, and vectors of tokens for layers."""
    return FrameSpec(
        embedding_scale=raw.count("hidden_size") ** 0.5,
        logit_cap=raw.optional_number("final_logit_softcapping") or 0.0,
        token_vectors=raw.count("vocab_size_per_layer_input") if raw.size("hidden_size_per_layer_input") else 0,
    )


_OWN = {"global_head_dim": 512, "num_global_key_value_heads": None, "num_experts_per_tok": None}
_NEITHER = {  # vectors of tokens, nor experts
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1, "enable_moe_block": False, "top_k_experts": None,
    "moe_intermediate_size": None,
}  # fmt: skip
_NAMES = (
    *NAMES,
    (".mlp.shared_expert", ".mlp"),
    (".mlp.experts_input_norm", ".pre_feedforward_layernorm_2"),
    (".mlp.experts_norm", ".post_feedforward_layernorm_2"),
    (".mlp.shared_norm", ".post_feedforward_layernorm_1"),
    (".mlp.experts", ".experts"),
    (".mlp.router_scales", ".router"),
    (".mlp.router", ".router.proj"),
)
_BESIDE = tuple(
    f"{before}{part}."
    for before in ("model.", "")
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
)
_INSIDE: dict[str, Any] = {
    "nested": "text_config",
    "names": (*_NAMES, ("model.", "model.language_model.")),
    "other_names": ((*_NAMES, ("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),),
    "ignored": _BESIDE,
}
GEMMA4 = Family("Gemma4ForCausalLM", "gemma4_text", gemma4_layers, gemma4_frame, own=_OWN, names=_NAMES)
GEMMA4_PICTURES = Family("Gemma4ForConditionalGeneration", "gemma4", gemma4_layers, gemma4_frame, own=_OWN, **_INSIDE)
GEMMA4_UNIFIED = Family(
    "Gemma4UnifiedForConditionalGeneration", "gemma4_unified", gemma4_layers, gemma4_frame,
    own=_OWN | _NEITHER, **_INSIDE,
)  # fmt: skip
