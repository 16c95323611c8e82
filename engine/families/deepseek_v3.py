"""DeepSeek-V3 and R1, and Kimi-K2, which has their shape."""

from __future__ import annotations

from typing import Any

from ..errors import ModelError
from . import deepseek_v2
from .deepseek_v2 import dense_then_mixtures, latent_attention_spec, mixture_spec
from .family import Family, expert_counts, layer_count, mlp_spec
from .layer_spec import AttentionSpec, LatentAttentionSpec, LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **deepseek_v2.DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,  # behind the last one, to draft tokens
}


def sigmoid_mixture(raw: RawConfig) -> MoESpec:
    """Experts weighted by sigmoids of their logits; for the choice, of groups and in them, a bias is added."""
    if (function := raw.get("scoring_func")) != "sigmoid":
        raise ModelError(f"config.json: scoring_func is {function!r}, supported is sigmoid: use another model")
    if (method := raw.get("topk_method")) not in (None, "noaux_tc"):  # with a bias, as the weights have one
        raise ModelError(f"config.json: topk_method is {method!r}, supported is noaux_tc: use another model")
    num_experts, top_k = expert_counts(raw, "n_routed_experts", "num_local_experts")
    routing = RoutingSpec(
        num_experts,
        top_k,
        score="sigmoid",
        correction=True,
        num_groups=raw.count("n_group"),
        kept_groups=raw.count("topk_group"),
        group_score="top2",
        renormalize=bool(raw.get("norm_topk_prob")),
        epsilon=1e-20,
        factor=raw.number("routed_scaling_factor"),
        fp32=True,
    )
    return mixture_spec(raw, routing)


def sigmoid_layers(raw: RawConfig, attention: AttentionSpec | LatentAttentionSpec) -> tuple[LayerSpec, ...]:
    """Dense ones, then mixtures of these experts; without any of them, nothing is asked of the experts' keys."""
    dense, count = dense_then_mixtures(raw), layer_count(raw)
    plain = (LayerSpec(attention, mlp_spec(raw)),) * dense
    return plain if dense == count else plain + (LayerSpec(attention, sigmoid_mixture(raw)),) * (count - dense)


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    return sigmoid_layers(raw, latent_attention_spec(raw, interleaved=raw.get("rope_interleave") is not False))


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    DEFAULTS,
    layers,
    names=deepseek_v2.NAMES,
    drafts="num_nextn_predict_layers",
)
