"""LFM2 and its mixture: layers of short convolutions with some of attention between them."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelError
from .family import Family, attention_spec, check_attends, conv_width, expert_counts, layer_count, layer_kinds, mlp_spec
from .layer_spec import AttentionSpec, ConvSpec, LayerSpec, MLPSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig, flag
from .rope_config import FULL

CONV = "conv"


def _mixers(raw: RawConfig) -> list[AttentionSpec | ConvSpec]:
    attending = raw.optional_list("full_attn_idxs")
    default = [FULL if attending is None or index in attending else CONV for index in range(layer_count(raw))]
    kinds = layer_kinds(raw, "layer_types", default, (FULL, CONV))
    check_attends(kinds, FULL)
    tied = flag(raw.values, "tie_embedding")
    if tied is not None and tied != bool(raw.get("tie_word_embeddings")):
        raise ModelError(
            "config.json: tie_embedding and tie_word_embeddings, which is read, differ: set the second to the same"
        )
    attention = replace(attention_spec(raw), qk_norm="head")
    conv = ConvSpec(raw.count("hidden_size"), conv_width(raw, "conv_L_cache"), bool(raw.get("conv_bias")))
    return [attention if kind == FULL else conv for kind in kinds]


def lfm2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Norms of query and key heads; the MLP's size is two thirds of what config.json names, rounded up."""
    inner = raw.optional_count("block_ff_dim") or raw.count("intermediate_size")
    if raw.get("block_auto_adjust_ff_dim"):
        inner, multiple = int(2 * inner / 3), raw.count("block_multiple_of")
        if (factor := raw.optional_number("block_ffn_dim_multiplier")) is not None:
            inner = -(-int(factor * inner) // multiple) * multiple
    return tuple(LayerSpec(mixer, MLPSpec(inner)) for mixer in _mixers(raw))


def lfm2_moe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Some dense layers, then experts chosen by sigmoids with a bias, whose weights sum to 1."""
    num_experts, top_k = expert_counts(raw, "num_experts")
    routing = RoutingSpec(
        num_experts, top_k, score="sigmoid", correction=bool(raw.get("use_expert_bias")),
        renormalize=bool(raw.get("norm_topk_prob")), epsilon=1e-6, factor=raw.number("routed_scaling_factor"),
        correction_name="expert_bias", correction_apart=True,
    )  # fmt: skip
    mixture, dense = MoESpec(raw.count("moe_intermediate_size"), routing), mlp_spec(raw)
    first = raw.size("num_dense_layers")
    return tuple(LayerSpec(mixer, dense if i < first else mixture) for i, mixer in enumerate(_mixers(raw)))


NAMES = (
    (".mlp.router", ".mlp.gate"),
    (".mlp", ".feed_forward"),
    (".gate_proj", ".w1"),
    (".up_proj", ".w3"),
    (".down_proj", ".w2"),
    (".input_layernorm", ".operator_norm"),
    (".post_attention_layernorm", ".ffn_norm"),
    (".o_proj", ".out_proj"),
    (".q_norm", ".q_layernorm"),
    (".k_norm", ".k_layernorm"),
    ("model.norm", "model.embedding_norm"),
)
LFM2 = Family(
    "Lfm2ForCausalLM", "lfm2", lfm2_layers, norm_eps="norm_eps", own={"block_ff_dim": None, "hidden_act": "silu"},
    names=NAMES, foreign=False,
)  # fmt: skip
LFM2_MOE = Family(
    "Lfm2MoeForCausalLM", "lfm2_moe", lfm2_moe_layers, norm_eps="norm_eps",
    own={"hidden_act": "silu", "full_attn_idxs": None}, names=NAMES, foreign=False,
)  # fmt: skip
