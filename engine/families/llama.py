"""Llama and what differs from it in little: Mistral, Mixtral, Phi 3, Seed-OSS, SmolLM 3, EuroBERT and Granite."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelError
from .family import Family, attention_spec, expert_counts, layer_count, mlp_spec, named_windows, window_of
from .layer_spec import AttentionSpec, FrameSpec, LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig
from .rope_config import read_rope


def llama_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """All alike; biases where the config has them."""
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    return (LayerSpec(attention, mlp_spec(raw, bias=bool(raw.get("mlp_bias")))),) * layer_count(raw)


LLAMA = Family("LlamaForCausalLM", "llama", llama_layers)
EUROBERT = Family("EuroBertForCausalLM", "eurobert", llama_layers, causal=False)  # Boizard et al., arXiv:2503.05500
# Trained further to read both ways; its classifiers say in "pooling" of what they make classes.
LLAMA_BOTH_WAYS = Family("LlamaBidirectionalForCausalLM", "llama_bidirec", llama_layers, like="llama", causal=False)


def mistral_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama without biases, and with a sliding window in every layer, where the config sets one."""
    attention = replace(attention_spec(raw), window=raw.optional_count("sliding_window") or 0)
    return (LayerSpec(attention, mlp_spec(raw)),) * layer_count(raw)


MISTRAL = Family("MistralForCausalLM", "mistral", mistral_layers)


MIXTRAL_NAMES = (
    (".mlp.router", ".block_sparse_moe.gate"),
    (".mlp.experts", ".block_sparse_moe.experts"),
    (".gate_proj", ".w1"),
    (".up_proj", ".w3"),
    (".down_proj", ".w2"),
)


def mixtral_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Mistral with experts in place of every MLP: weights are a softmax's, divided by the sum of what was chosen."""
    attention = replace(attention_spec(raw), window=raw.optional_count("sliding_window") or 0)
    num_experts, top_k = expert_counts(raw, "num_local_experts")
    routing = RoutingSpec(num_experts, top_k, renormalize=True)
    return (LayerSpec(attention, MoESpec(mlp_spec(raw).inner, routing)),) * layer_count(raw)


MIXTRAL = Family("MixtralForCausalLM", "mixtral", mixtral_layers, names=MIXTRAL_NAMES)


def phi3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with q, k, v in one matrix, gate and up in another, a window in every layer where the config has one, and
    a part of each head rotated."""
    original = {"original_max_position_embeddings": raw.count("original_max_position_embeddings")}
    rope = read_rope({**raw.values, **original}, raw.count("max_position_embeddings"), aliases={"yarn": "longrope"})
    window = raw.optional_count("sliding_window") or 0
    attention = replace(attention_spec(raw, rope=rope, rotated=1.0), fused=True, window=window)
    return (LayerSpec(attention, replace(mlp_spec(raw), fused=True)),) * layer_count(raw)


PHI3 = Family("Phi3ForCausalLM", "phi3", phi3_layers)


def seed_oss_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with biases of q, k and v, and of the output, each by its own key."""
    attention = replace(
        attention_spec(raw), qkv_bias=bool(raw.get("attention_bias")), output_bias=bool(raw.get("attention_out_bias"))
    )
    return (LayerSpec(attention, mlp_spec(raw, bias=bool(raw.get("mlp_bias")))),) * layer_count(raw)


SEED_OSS = Family("SeedOssForCausalLM", "seed_oss", seed_oss_layers)


def smollm3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with every fourth layer not rotated; those are the ones that may have a window."""
    count, every = layer_count(raw), raw.count("no_rope_layer_interval")
    rotated = raw.optional_list("no_rope_layers") or [(index + 1) % every != 0 for index in range(count)]
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


SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", smollm3_layers)


def granite_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with a scale of its own for scores, and one for what is added to the residual stream."""
    scale, residual = raw.number("attention_multiplier"), raw.number("residual_multiplier")
    return tuple(
        LayerSpec(replace(attention, scale=scale), layer.mlp, residual_scale=residual)
        for layer in llama_layers(raw)
        if isinstance(attention := layer.mixer, AttentionSpec)
    )


def granite_frame(raw: RawConfig) -> FrameSpec:
    return FrameSpec(embedding_scale=raw.number("embedding_multiplier"), logit_scale=1.0 / raw.number("logits_scaling"))


GRANITE = Family("GraniteForCausalLM", "granite", granite_layers, granite_frame)


GRANITE_MOE_NAMES = (
    (".mlp.router", ".block_sparse_moe.router.layer"),
    (".mlp.experts", ".block_sparse_moe"),
    (".mlp.shared_expert.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.shared_expert.down_proj", ".shared_mlp.output_linear"),
)


def granite_moe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with multipliers, and experts weighted by a softmax over those that were chosen."""
    attention = replace(
        attention_spec(raw, bias=bool(raw.get("attention_bias"))), scale=raw.number("attention_multiplier")
    )
    scale = raw.number("residual_multiplier")
    return (LayerSpec(attention, granite_mixture(raw), residual_scale=scale),) * layer_count(raw)


def granite_mixture(raw: RawConfig) -> MoESpec:
    num_experts, top_k = expert_counts(raw, "num_local_experts")
    return MoESpec(
        mlp_spec(raw).inner,
        RoutingSpec(num_experts, top_k, score="none", softmax_chosen=True),
        shared_inner=raw.size("shared_intermediate_size"),
        shared_fused=True,
        stored="stacked",
        stacked_names=("input_linear.weight", "output_linear.weight"),
    )


GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    granite_moe_layers,
    granite_frame,
    own={"shared_intermediate_size": 0},
    names=GRANITE_MOE_NAMES,
)
GRANITE_MOE_SHARED = Family(
    "GraniteMoeSharedForCausalLM", "granitemoeshared", granite_moe_layers, granite_frame, names=GRANITE_MOE_NAMES
)
