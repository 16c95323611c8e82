"""Models whose layers are another family's under a class, or keys of config.json, of their own."""

from __future__ import annotations

from dataclasses import replace

from .deepseek import DEEPSEEK_V3
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import LayerSpec
from .llama import LLAMA, MIXTRAL
from .raw_config import RawConfig


def internlm3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama's. The authors' files call the biases of q, k and v qkv_bias, and those of all other products bias."""
    qkv = raw.get("attention_bias" if raw.values.get("qkv_bias") is None else "qkv_bias")
    others = raw.get("mlp_bias" if raw.values.get("bias") is None else "bias")
    attention = replace(attention_spec(raw), qkv_bias=bool(qkv), output_bias=bool(others))
    return (LayerSpec(attention, mlp_spec(raw, bias=bool(others))),) * layer_count(raw)


INTERNLM3 = Family("InternLM3ForCausalLM", "internlm3", internlm3_layers, own={"qkv_bias": False, "bias": False})

# Classes of folders' own code, whose layers and names of weights are the family's.
OTHER_CLASSES: dict[str, Family] = {
    "AquilaForCausalLM": LLAMA,
    "AquilaModel": LLAMA,
    "IQuestCoderForCausalLM": LLAMA,
    "LLaMAForCausalLM": LLAMA,
    "QuantMixtralForCausalLM": MIXTRAL,
    "XverseForCausalLM": LLAMA,
}
OTHER_TYPES = {"kimi_k2": DEEPSEEK_V3}
