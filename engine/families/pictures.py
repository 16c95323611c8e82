"""Models of pictures and text: a row each says which family of text it is, under which class, and what looks at
pictures; where it names nothing, the text alone is served. Gemma 3's stands beside its text (gemma)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .deepseek import DEEPSEEK_V3
from .family import Family, attention_spec, layer_count, mlp_spec
from .glm import GLM4, GLM4_MOE
from .layer_spec import LayerSpec, MoESpec, Names
from .llama import LLAMA, MISTRAL
from .qwen import QWEN2, QWEN3, QWEN3_MOE, qwen3_moe_layers
from .raw_config import RawConfig
from .towers import internvl_vision, llava_vision, pixtral_vision, qwen2_5_vl_vision, qwen2_vl_vision, qwen3_vl_vision

# Where the decoder stands in a checkpoint: as transformers writes it, as it did before 4.52, and as Qwen 2 VL had it.
_PLACES: tuple[Names, ...] = (
    (("model.", "model.language_model."),),
    (("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    (),
)
# What looks at pictures, under all of its names.
_TOWERS = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector.", "mlp1.", "image_newline",
    "model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.mm_projector.",
    "model.image_newline",
)  # fmt: skip


def beside_pictures(
    text: Family, architecture: str, model_type: str, *, nested: str = "text_config", **changes: Any
) -> Family:
    """The family whose decoder is one of `text`, described by the object `nested` of config.json, or at its top where
    there is none."""
    names, *others = ((*text.names, *place) for place in _PLACES)
    return replace(
        text, architecture=architecture, model_type=model_type, nested=nested, names=names, other_names=tuple(others),
        ignored=_TOWERS, **changes,
    )  # fmt: skip


def of_any_text(
    text: Family, architecture: str, model_type: str, nested: str = "text_config", **changes: Any
) -> Family:
    """The same, where the nested object may name any family of text: `text` is where it names none."""
    like = text.like or text.model_type
    return beside_pictures(text, architecture, model_type, nested=nested, like=like, varied=True, **changes)


def with_text(family: Family, text: Family) -> Family:
    """The same model of pictures with another decoder."""
    return of_any_text(text, family.architecture, family.model_type, family.nested, vision=family.vision)


def glm4v_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """GLM 4's, whose biases the config does not name."""
    attention = replace(attention_spec(raw, rotated=1.0), qkv_bias=True, interleaved=True)
    return (LayerSpec(attention, replace(mlp_spec(raw), fused=True), norms="both"),) * layer_count(raw)


def qwen3_vl_moe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 3's, with experts in one tensor, whose weights always sum to 1."""
    always = RawConfig({**raw.values, "norm_topk_prob": True}, raw.defaults)
    return tuple(
        replace(layer, mlp=replace(layer.mlp, stored="transposed")) if isinstance(layer.mlp, MoESpec) else layer
        for layer in qwen3_moe_layers(always)
    )


_NO_WINDOWS = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 0, "layer_types": None}
_QWEN3_VL_MOE = {**_NO_WINDOWS, "norm_topk_prob": True}
PICTURES = (
    beside_pictures(QWEN2, "Qwen2VLForConditionalGeneration", "qwen2_vl", vision=qwen2_vl_vision),
    beside_pictures(QWEN2, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", vision=qwen2_5_vl_vision),
    beside_pictures(QWEN3, "Qwen3VLForConditionalGeneration", "qwen3_vl", own=_NO_WINDOWS, vision=qwen3_vl_vision),
    beside_pictures(
        QWEN3_MOE,
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        layers=qwen3_vl_moe_layers,
        own=_QWEN3_VL_MOE,
        vision=qwen3_vl_vision,
    ),
    beside_pictures(GLM4, "Glm4vForConditionalGeneration", "glm4v", layers=glm4v_layers),
    beside_pictures(GLM4, "Glm46VForConditionalGeneration", "glm46v", layers=glm4v_layers, like="glm4v"),
    beside_pictures(
        GLM4_MOE, "Glm4vMoeForConditionalGeneration", "glm4v_moe", own={**GLM4_MOE.own, "use_qk_norm": False}
    ),
    of_any_text(MISTRAL, "Mistral3ForConditionalGeneration", "mistral3", vision=pixtral_vision),
    of_any_text(DEEPSEEK_V3, "Kimi_K25ForConditionalGeneration", "kimi_k25"),  # as transformers writes it
    of_any_text(DEEPSEEK_V3, "KimiK25ForConditionalGeneration", "kimi_k25"),
    of_any_text(QWEN2, "InternVLForConditionalGeneration", "internvl", vision=internvl_vision),
    of_any_text(QWEN2, "InternVLChatModel", "internvl_chat", "llm_config"),
    of_any_text(LLAMA, "LlavaForConditionalGeneration", "llava", vision=llava_vision),
    of_any_text(LLAMA, "LlavaNextForConditionalGeneration", "llava_next"),
    of_any_text(LLAMA, "LlavaNextVideoForConditionalGeneration", "llava_next_video"),
    of_any_text(QWEN2, "LlavaOnevisionForConditionalGeneration", "llava_onevision"),
)
