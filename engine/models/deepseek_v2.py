"""DeepSeek-V2 and V2-Lite: latent attention."""

from __future__ import annotations

import math
from typing import Any

from ..layer_spec import LatentAttentionSpec, LayerSpec
from ..model_file import ModelError
from ..raw_config import RawConfig
from ..rope_config import read_rope
from .family import Family, layer_count, mlp_spec

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
}


def latent_attention_spec(raw: RawConfig, *, interleaved: bool = True) -> LatentAttentionSpec:
    nope, rotated = raw.count("qk_nope_head_dim"), raw.count("qk_rope_head_dim")
    if rotated % 2:
        raise ModelError(
            f"config.json: qk_rope_head_dim is {rotated}, rotary embedding needs an even one: correct the file"
        )
    rope = read_rope(raw.values, raw.count("max_position_embeddings"))
    scale = (nope + rotated) ** -0.5
    if rope.mscale_all_dim and rope.factor > 1:  # yarn's temperature, for all of the score and not only what is rotated
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return LatentAttentionSpec(
        num_heads=raw.count("num_attention_heads"),
        q_rank=raw.optional_count("q_lora_rank") or 0,
        kv_rank=raw.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=raw.count("v_head_dim"),
        rope=rope,
        scale=scale,
        bias=bool(raw.get("attention_bias")),
        interleaved=interleaved,
    )


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    attention, mlp = latent_attention_spec(raw), mlp_spec(raw, bias=bool(raw.get("mlp_bias")))
    count = layer_count(raw)
    if (raw.get("first_k_dense_replace") or 0) < count:
        raise ModelError("config.json: experts (first_k_dense_replace) are not supported yet: use another model")
    return (LayerSpec(attention, mlp),) * count


DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", DEFAULTS, layers)
