"""DeepSeek-V3 and R1, Kimi-K2: latent attention."""

from __future__ import annotations

from typing import Any

from ..layer_spec import LayerSpec
from ..model_file import ModelError
from ..raw_config import RawConfig
from . import deepseek_v2
from .deepseek_v2 import latent_attention_spec
from .family import Family, layer_count, mlp_spec

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
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    attention = latent_attention_spec(raw, interleaved=raw.get("rope_interleave") is not False)
    count = layer_count(raw)
    if (raw.get("first_k_dense_replace") or 0) < count:
        raise ModelError("config.json: experts (first_k_dense_replace) are not supported yet: use another model")
    return (LayerSpec(attention, mlp_spec(raw)),) * count


DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", DEFAULTS, layers)
