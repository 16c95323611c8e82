"""DeepSeek-V2 and V2-Lite: latent attention, and after the first layers mixtures with a shared expert."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ModelError
from .family import Family, expert_counts, layer_count, mlp_spec
from .layer_spec import LatentAttentionSpec, LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig
from .rope_config import read_rope

DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "q_lora_rank": 1536,  # null: queries are projected at once
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
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


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
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


DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", DEFAULTS, layers, names=NAMES)
