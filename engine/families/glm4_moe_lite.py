"""GLM-4.7-Flash: DeepSeek-V3's layers in other sizes."""

from __future__ import annotations

from typing import Any

from ..errors import ModelError
from . import deepseek_v3
from .deepseek_v2 import latent_attention_spec
from .deepseek_v3 import sigmoid_mixture
from .family import Family, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **deepseek_v3.DEFAULTS,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "mlp_layer_types": None,  # null: the first is dense
}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
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
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    DEFAULTS,
    layers,
    names=deepseek_v3.DEEPSEEK_V3.names,
    drafts="num_nextn_predict_layers",
)
