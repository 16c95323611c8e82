"""Models whose norms stand elsewhere than Llama's: OLMo 2 and 3, OLMoE, EXAONE 4, and Cohere's Command R and Aya."""

from __future__ import annotations

from dataclasses import replace

from . import qwen
from .family import Family, attention_spec, expert_counts, layer_count, mlp_spec, windows_of
from .layer_spec import AttentionSpec, FrameSpec, LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig, number
from .rope_config import RopeConfig, read_ropes

# Norms stand after attention and MLP only, and one has the name that llama's before the MLP has.
NAMES = (("post_self_attn_layernorm", "post_attention_layernorm"), ("post_mlp_layernorm", "post_feedforward_layernorm"))


def olmo2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with norms after attention and MLP in place of those before, and one over all queries and over all keys."""
    return (LayerSpec(_attention(raw), mlp_spec(raw), norms="post"),) * layer_count(raw)


def olmo3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """OLMo 2 with a window in three layers of four; only the fourth's rotation is stretched."""
    full, sliding = read_ropes(raw.values, raw.count("max_position_embeddings"), raw.default_theta)
    attention, mlp = _attention(raw, full), mlp_spec(raw)
    return tuple(
        LayerSpec(replace(attention, window=window, rope=sliding if window else full), mlp, norms="post")
        for window in windows_of(raw, full_every=4)
    )


def _attention(raw: RawConfig, rope: RopeConfig | None = None) -> AttentionSpec:
    return replace(attention_spec(raw, bias=bool(raw.get("attention_bias")), rope=rope), qk_norm="width")


OLMO2 = Family("Olmo2ForCausalLM", "olmo2", olmo2_layers, names=NAMES)
OLMO3 = Family("Olmo3ForCausalLM", "olmo3", olmo3_layers, names=NAMES)


def olmoe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with norms over all queries and over all keys, and experts in place of every MLP."""
    clip = 0.0 if raw.get("clip_qkv") is None else number(raw.values, "clip_qkv")
    attention = replace(attention_spec(raw, bias=bool(raw.get("attention_bias"))), qk_norm="width", clip=clip)
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=bool(raw.get("norm_topk_prob")))
    return (LayerSpec(attention, MoESpec(mlp_spec(raw).inner, routing)),) * layer_count(raw)


OLMOE = Family("OlmoeForCausalLM", "olmoe", olmoe_layers, names=qwen.ROUTER_NAMES)


def exaone4_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """OLMo 2 with a norm on every query and key head. Where there are windows, the layers without are not rotated."""
    attention, mlp = replace(attention_spec(raw), qk_norm="head"), mlp_spec(raw)
    pattern = raw.get("sliding_window_pattern")  # "LLLG" is 4
    every = len(pattern) if isinstance(pattern, str) and pattern else raw.size("sliding_window_pattern") or 1
    full = attention if raw.optional_count("sliding_window") is None else replace(attention, rope=None)
    return tuple(
        LayerSpec(replace(attention, window=window) if window else full, mlp, norms="post")
        for window in windows_of(raw, full_every=every)
    )


EXAONE4 = Family("Exaone4ForCausalLM", "exaone4", exaone4_layers, names=NAMES)


def cohere_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Attention and MLP side by side behind one LayerNorm; heads rotated by neighbours, in R+ each normed before."""
    attention = cohere_attention(raw)
    if raw.get("use_qk_norm"):
        attention = replace(attention, qk_norm="each")
    return (LayerSpec(attention, mlp_spec(raw), norms="parallel"),) * layer_count(raw)


def cohere_attention(raw: RawConfig) -> AttentionSpec:
    return replace(attention_spec(raw, bias=bool(raw.get("attention_bias"))), interleaved=True)


def cohere_frame(raw: RawConfig) -> FrameSpec:
    return FrameSpec("layer", logit_scale=raw.optional_number("logit_scale") or 1.0)


COHERE = Family("CohereForCausalLM", "cohere", cohere_layers, cohere_frame, norm_eps="layer_norm_eps")


def cohere2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Command R with a window in three layers of four; the fourth sees everything, and is not rotated."""
    attention, mlp = cohere_attention(raw), mlp_spec(raw)
    return tuple(
        LayerSpec(replace(attention, window=window, rope=attention.rope if window else None), mlp, norms="parallel")
        for window in windows_of(raw, full_every=raw.count("sliding_window_pattern"))
    )


COHERE2 = Family(
    "Cohere2ForCausalLM",
    "cohere2",
    cohere2_layers,
    cohere_frame,
    own={"sliding_window_pattern": 4},
    norm_eps="layer_norm_eps",
)
