"""Mistral's models since Ministral 3: queries that grow with their position, then latent attention with experts."""

from __future__ import annotations

from .deepseek import NAMES, dense_then_mixtures, latent_attention_spec, mixture_spec
from .family import Family, expert_counts, layer_count, mlp_spec
from .layer_spec import LayerSpec, RoutingSpec
from .llama import mistral_layers
from .raw_config import RawConfig

# transformers' rotation where config.json says nothing of it.
_YARN = {
    "rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MINISTRAL3_ROPE = {**_YARN, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
_MISTRAL4_ROPE = {**_YARN, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
_OWN = {"rope_scaling": None, "rope_parameters": None}


def _with_rope(raw: RawConfig, rope: dict[str, object]) -> RawConfig:
    there = raw.get("rope_scaling") or raw.get("rope_parameters")
    return raw if there else RawConfig({**raw.values, "rope_parameters": rope}, raw.defaults)


def ministral3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    return mistral_layers(_with_rope(raw, _MINISTRAL3_ROPE))


def mistral4_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """DeepSeek V3's, with experts weighted by a softmax over all of them, whose chosen part sums to 1."""
    raw = _with_rope(raw, _MISTRAL4_ROPE)
    attention = latent_attention_spec(raw, interleaved=raw.get("rope_interleave") is not False)
    dense, count = dense_then_mixtures(raw), layer_count(raw)
    plain = (LayerSpec(attention, mlp_spec(raw)),) * dense
    if dense == count:
        return plain
    num_experts, top_k = expert_counts(raw, "n_routed_experts", "num_local_experts")
    routing = RoutingSpec(
        num_experts,
        top_k,
        num_groups=raw.count("n_group"),
        kept_groups=raw.count("topk_group"),
        group_score="top2",
        renormalize=raw.get("norm_topk_prob") is not False,
        epsilon=1e-20,
        factor=raw.number("routed_scaling_factor"),
    )
    return plain + (LayerSpec(attention, mixture_spec(raw, routing)),) * (count - dense)


MINISTRAL3 = Family("Ministral3ForCausalLM", "ministral3", ministral3_layers, own=_OWN)
MISTRAL4 = Family("Mistral4ForCausalLM", "mistral4", mistral4_layers, own=_OWN, names=NAMES)
_OF_THE_AUTHORS = (  # of names in files that Mistral writes without transformers
    ("model.embed_tokens", "tok_embeddings"),
    ("model.norm", "norm"),
    ("lm_head", "output"),
    ("model.layers", "layers"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attention_norm"),
    (".self_attn.", ".attention."),
    (".q_a_proj", ".wq_a"),
    (".q_a_layernorm", ".q_a_norm"),
    (".q_b_proj", ".wq_b"),
    (".kv_a_proj_with_mqa", ".wkv_a_with_mqa"),
    (".kv_a_layernorm", ".kv_a_norm"),
    (".kv_b_proj", ".wkv_b"),
    (".o_proj", ".wo"),
    (".mlp.router", ".gate"),
    (".mlp.shared_expert.", ".shared_experts."),
    (".mlp.experts", ".experts"),
    (".mlp.", ".feed_forward."),
    (".gate_proj", ".w1"),
    (".up_proj", ".w3"),
    (".down_proj", ".w2"),
)
MISTRAL_LARGE3 = Family(
    "MistralLarge3ForCausalLM", "mistral_large_3", mistral4_layers, own=_OWN, like="mistral4", names=NAMES,
    other_names=(_OF_THE_AUTHORS,),
)  # fmt: skip
