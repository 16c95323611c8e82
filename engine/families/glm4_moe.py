"""GLM-4.5 to 4.7, and their Air."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import deepseek_v2, llama
from .deepseek_v3 import sigmoid_layers
from .family import Family, attention_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "eos_token_id": None,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "num_local_experts": None,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,  # behind the last one, to draft tokens
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with half of each head rotated, biases on q, k and v and norms on q and k by the config; then DeepSeek-V3's
    experts in all layers but the first."""
    attention = replace(
        attention_spec(raw, rotated=0.5),
        qkv_bias=bool(raw.get("attention_bias")),
        qk_norm="head" if raw.get("use_qk_norm") else "",
    )
    return sigmoid_layers(raw, attention)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    DEFAULTS,
    layers,
    names=deepseek_v2.NAMES,
    drafts="num_nextn_predict_layers",
)
