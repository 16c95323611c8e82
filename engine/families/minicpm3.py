"""MiniCPM3: latent attention, without experts, and MiniCPM's factors."""

from __future__ import annotations

from typing import Any

from . import deepseek_v2
from .deepseek_v2 import latent_attention_spec
from .family import Family, layer_count, mlp_spec
from .layer_spec import FrameSpec, LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **deepseek_v2.DEFAULTS,
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,  # null: hidden_size / num_attention_heads
    "scale_emb": 12,
    "scale_depth": 1.4,  # null: what is added to the residual stream stays as it is
    "dim_model_base": 256,  # null: logits stay as they are
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    count = layer_count(raw)
    attention = latent_attention_spec(raw, interleaved=False)
    residual = 1.0 if raw.get("scale_depth") is None else raw.number("scale_depth") / count**0.5
    return (LayerSpec(attention, mlp_spec(raw, bias=bool(raw.get("mlp_bias"))), residual_scale=residual),) * count


def frame(raw: RawConfig) -> FrameSpec:
    base = raw.optional_count("dim_model_base") or raw.count("hidden_size")
    return FrameSpec(embedding_scale=raw.number("scale_emb"), logit_scale=base / raw.count("hidden_size"))


MINICPM3 = Family("MiniCPM3ForCausalLM", "minicpm3", DEFAULTS, layers, frame)
