"""Qwen 3.5 and Qwen3-Next: three layers of gated delta nets, then one of attention with an output gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..errors import ModelError
from .family import (
    Family,
    activation_of,
    attention_spec,
    check_attends,
    conv_width,
    dense_or_mixture,
    expert_counts,
    layer_count,
    layer_kinds,
    mlp_spec,
    named,
)
from .layer_spec import DTYPES, DeltaSpec, DraftingSpec, FrameSpec, LayerSpec, MLPSpec, MoESpec, RoutingSpec
from .qwen import ROUTER_NAMES
from .raw_config import RawConfig
from .rope_config import FULL
from .towers import qwen3_5_vision

LINEAR = "linear_attention"
_GATES: dict[str, Literal["silu", "sigmoid"]] = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def _layers(raw: RawConfig, mlps: tuple[MLPSpec | MoESpec, ...], by_head: bool = False) -> tuple[LayerSpec, ...]:
    attention = replace(
        attention_spec(raw, bias=bool(raw.get("attention_bias")), rotated=0.25),
        qk_norm="head", output_gate=bool(raw.get("attn_output_gate")),
    )  # fmt: skip
    delta = _delta(raw, by_head)
    return tuple(
        LayerSpec(delta if kind == LINEAR else attention, mlp) for kind, mlp in zip(_kinds(raw), mlps, strict=True)
    )


def _kinds(raw: RawConfig) -> list[str]:
    """Of each layer, as layer_types or full_attention_interval says."""
    count, every = layer_count(raw), raw.count("full_attention_interval")
    default = [LINEAR if (i + 1) % every else FULL for i in range(count)]
    kinds = layer_kinds(raw, "layer_types", default, (LINEAR, FULL))
    check_attends(kinds, FULL)
    return kinds


def _delta(raw: RawConfig, by_head: bool) -> DeltaSpec:
    keys, values = raw.count("linear_num_key_heads"), raw.count("linear_num_value_heads")
    width = conv_width(raw, "linear_conv_kernel_dim")
    if values % keys:
        raise ModelError(
            f"config.json: linear_num_value_heads {values} is no multiple of linear_num_key_heads {keys}: correct the "
            "file"
        )
    return DeltaSpec(
        keys, values, raw.count("linear_key_head_dim"), raw.count("linear_value_head_dim"), width,
        named(raw, "output_gate_type", _GATES), by_head, named(raw, "mamba_ssm_dtype", DTYPES),
    )  # fmt: skip


def _frame(raw: RawConfig) -> FrameSpec:
    return FrameSpec(norm="rms_less_one")


def qwen3_5_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    return _layers(raw, (mlp_spec(raw),) * layer_count(raw))


def _mixture(raw: RawConfig, renormalize: bool) -> MoESpec:
    """Experts weighted by a softmax over all of them, and a shared one whose result is gated."""
    activation_of(raw, "hidden_act")
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    inner, shared = raw.count("moe_intermediate_size"), raw.count("shared_expert_intermediate_size")
    routing = RoutingSpec(num_experts, top_k, renormalize=renormalize)
    return MoESpec(inner, routing, shared, shared_gate=True, stored="stacked")


def qwen3_5_moe_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    return _layers(raw, (_mixture(raw, renormalize=True),) * layer_count(raw))


def qwen3_next_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """The file has the projections of delta nets by head of keys; some layers may be dense."""
    mixture = _mixture(raw, bool(raw.get("norm_topk_prob")))
    return _layers(raw, dense_or_mixture(raw, mixture), by_head=True)


_OWN = {
    "full_attention_interval": 4, "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"
}  # fmt: skip
_IGNORED = ("mtp.", "model.visual.", "visual.")  # the layer that drafts, and what looks at pictures
_TEXT = (("model.", "model.language_model."),)  # beside pictures
_MTP = DraftingSpec(
    "mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", lm_head="", goes_on_normed=True
)

QWEN3_5 = Family(
    "Qwen3_5ForCausalLM", "qwen3_5_text", qwen3_5_layers, _frame,
    own=_OWN, other_names=(_TEXT,), ignored=_IGNORED, drafting=_MTP, foreign=False,
)  # fmt: skip
QWEN3_5_PICTURES = Family(
    "Qwen3_5ForConditionalGeneration", "qwen3_5", qwen3_5_layers, _frame,
    own=_OWN, nested="text_config", names=_TEXT, other_names=((),), ignored=_IGNORED, drafting=_MTP, foreign=False,
    vision=qwen3_5_vision,
)  # fmt: skip
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", qwen3_5_moe_layers, _frame,
    own=_OWN, names=ROUTER_NAMES, other_names=((*ROUTER_NAMES, *_TEXT),), ignored=_IGNORED, drafting=_MTP,
    foreign=False,
)  # fmt: skip
QWEN3_5_MOE_PICTURES = Family(
    "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", qwen3_5_moe_layers, _frame,
    own=_OWN, nested="text_config", names=(*ROUTER_NAMES, *_TEXT), other_names=(ROUTER_NAMES,), ignored=_IGNORED,
    drafting=_MTP, foreign=False, vision=qwen3_5_vision,
)  # fmt: skip
QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM", "qwen3_next", qwen3_next_layers, _frame, own=_OWN, names=ROUTER_NAMES, ignored=_IGNORED,
    drafting=_MTP, foreign=False,
)  # fmt: skip
