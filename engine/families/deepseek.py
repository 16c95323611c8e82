"""Models with latent attention: DeepSeek-V2 and V3 (R1, Kimi-K2), GLM-4.7-Flash, MiniCPM 3."""

from __future__ import annotations

import math

from ..errors import ModelError
from .family import Family, expert_counts, layer_count, mlp_spec
from .layer_spec import AttentionSpec, FrameSpec, LatentAttentionSpec, LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig
from .rope_config import read_rope

NAMES = ((".mlp.router", ".mlp.gate"), (".mlp.shared_expert.", ".mlp.shared_experts."))


def latent_attention_spec(raw: RawConfig, *, interleaved: bool = True) -> LatentAttentionSpec:
    nope, rotated = raw.count("qk_nope_head_dim"), raw.count("qk_rope_head_dim")
    if rotated % 2:
        raise ModelError(
            f"config.json: qk_rope_head_dim is {rotated}, rotary embedding needs an even one: correct the file"
        )
    rope = read_rope(raw.values, raw.count("max_position_embeddings"), raw.default_theta)
    scale = (nope + rotated) ** -0.5
    if rope.mscale_all_dim and rope.factor > 1:  # yarn's temperature, for all of the score and not only what is rotated
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return LatentAttentionSpec(
        num_heads=raw.count("num_attention_heads"),
        q_rank=raw.optional_count("q_lora_rank") or 0,
        kv_rank=raw.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=raw.optional_count("v_head_dim") or raw.count("hidden_size") // raw.count("num_attention_heads"),
        rope=rope,
        scale=scale,
        bias=bool(raw.get("attention_bias")),
        interleaved=interleaved,
    )


def mixture_spec(raw: RawConfig, routing: RoutingSpec) -> MoESpec:
    """Experts, and the shared ones as one MLP of all their gates."""
    inner, shared = raw.count("moe_intermediate_size"), raw.size("n_shared_experts")
    groups, chosen = routing.num_groups, routing.kept_groups
    if routing.num_experts % groups or chosen > groups:
        raise ModelError(
            f"config.json: {routing.num_experts} experts are no {groups} groups (n_group) of which {chosen} "
            "(topk_group) are chosen from: correct the file"
        )
    return MoESpec(inner, routing, shared_inner=shared * inner)


def dense_then_mixtures(raw: RawConfig) -> int:
    """→ how many layers are dense, before all others."""
    return min(raw.size("first_k_dense_replace"), layer_count(raw))


def v2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Experts weighted by a softmax over all of them, times a factor; with groups, chosen from the best ones."""
    attention, mlp = latent_attention_spec(raw), mlp_spec(raw, bias=bool(raw.get("mlp_bias")))
    dense, count = dense_then_mixtures(raw), layer_count(raw)
    if dense == count:
        return (LayerSpec(attention, mlp),) * count
    method = raw.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"config.json: topk_method is {method!r}, supported are greedy and group_limited_greedy: use another model"
        )
    for key in ("norm_topk_prob", "mlp_bias"):  # about the first, libraries disagree
        if raw.get(key):
            raise ModelError(f"config.json: {key} is set, which is not supported with experts: use another model")
    if raw.get("num_experts_per_tok") is None:
        raise ModelError("config.json: num_experts_per_tok is missing, to how many experts a token goes: add it")
    grouped = method == "group_limited_greedy"
    num_experts, top_k = expert_counts(raw, "n_routed_experts", "num_experts")
    routing = RoutingSpec(
        num_experts,
        top_k,
        num_groups=raw.count("n_group") if grouped else 1,
        kept_groups=raw.count("topk_group") if grouped else 1,
        factor=raw.number("routed_scaling_factor"),
        fp32=True,
    )
    mixture = LayerSpec(attention, mixture_spec(raw, routing))
    return (LayerSpec(attention, mlp),) * dense + (mixture,) * (count - dense)


DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", v2_layers, names=NAMES)


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


def v3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    return sigmoid_layers(raw, latent_attention_spec(raw, interleaved=raw.get("rope_interleave") is not False))


DRAFTS = "num_nextn_predict_layers"  # behind the last one, to draft tokens
EXPERTS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", DRAFTS: 1}
DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", v3_layers, own=EXPERTS, names=NAMES, drafts=DRAFTS)


def glm4_moe_lite_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    attention = latent_attention_spec(raw, interleaved=raw.get("rope_interleave") is not False)
    count = layer_count(raw)
    kinds = raw.optional_list("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    if len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ModelError(
            f"config.json: mlp_layer_types has {len(kinds)} entries for {count} layers, each of which must be dense or "
            "sparse: correct the file"
        )
    plain, mixture = LayerSpec(attention, mlp_spec(raw)), LayerSpec(attention, sigmoid_mixture(raw))
    return tuple(plain if kind == "dense" else mixture for kind in kinds)


GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM", "glm4_moe_lite", glm4_moe_lite_layers, own=EXPERTS, names=NAMES, drafts=DRAFTS
)


def minicpm3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    count = layer_count(raw)
    attention = latent_attention_spec(raw, interleaved=False)
    residual = 1.0 if raw.get("scale_depth") is None else raw.number("scale_depth") / count**0.5
    return (LayerSpec(attention, mlp_spec(raw, bias=bool(raw.get("mlp_bias"))), residual_scale=residual),) * count


def minicpm3_frame(raw: RawConfig) -> FrameSpec:
    base = raw.optional_count("dim_model_base") or raw.count("hidden_size")
    return FrameSpec(embedding_scale=raw.number("scale_emb"), logit_scale=base / raw.count("hidden_size"))


MINICPM3 = Family("MiniCPM3ForCausalLM", "minicpm3", minicpm3_layers, minicpm3_frame)
