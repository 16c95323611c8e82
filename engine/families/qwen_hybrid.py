"""Qwen 3.5 and Qwen3-Next: three layers of gated delta nets, then one of attention with an output gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from ..errors import ModelError
from .family import Family, activation_of, attention_spec, dense_or_mixture, expert_counts, layer_count, mlp_spec
from .layer_spec import DeltaSpec, FrameSpec, LayerSpec, MLPSpec, MoESpec, RoutingSpec
from .qwen import ROUTER_NAMES
from .raw_config import RawConfig
from .towers import qwen3_5_vision

LINEAR, FULL = "linear_attention", "full_attention"
_GATES: dict[str, Literal["silu", "sigmoid"]] = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
_DTYPES: dict[str, Literal["float32", "float16", "bfloat16"]] = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"
}  # fmt: skip
MAX_WIDTH = 8  # of the convolution


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
    kinds = raw.optional_list("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(count)]
    if len(kinds) != count:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {count} layers: correct the file")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ModelError(
                f"config.json: layer type {kind!r:.60} is not supported ({LINEAR}, {FULL} are): use another model"
            )
    if FULL not in kinds:
        raise ModelError(
            f"config.json: no layer is of the type {FULL}, and a model of {LINEAR} alone is not served: use another "
            "model"
        )
    return kinds


def _delta(raw: RawConfig, by_head: bool) -> DeltaSpec:
    keys, values = raw.count("linear_num_key_heads"), raw.count("linear_num_value_heads")
    width = raw.count("linear_conv_kernel_dim")
    if values % keys:
        raise ModelError(
            f"config.json: linear_num_value_heads {values} is no multiple of linear_num_key_heads {keys}: correct the "
            "file"
        )
    if not 2 <= width <= MAX_WIDTH:
        raise ModelError(
            f"config.json: linear_conv_kernel_dim is {width}, from 2 to {MAX_WIDTH} are run: use another model"
        )
    return DeltaSpec(
        keys, values, raw.count("linear_key_head_dim"), raw.count("linear_value_head_dim"), width,
        _named(raw, "output_gate_type", _GATES), by_head, _named(raw, "mamba_ssm_dtype", _DTYPES),
    )  # fmt: skip


def _named(raw: RawConfig, key: str, known: dict[str, Any]) -> Any:
    name = raw.get(key) or raw.defaults[key]
    if name not in known:
        raise ModelError(f"config.json: {key} is {name!r:.60}, supported are {', '.join(known)}: use another model")
    return known[name]


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

QWEN3_5 = Family(
    "Qwen3_5ForCausalLM", "qwen3_5_text", qwen3_5_layers, _frame,
    own=_OWN, other_names=(_TEXT,), ignored=_IGNORED, foreign=False,
)  # fmt: skip
QWEN3_5_PICTURES = Family(
    "Qwen3_5ForConditionalGeneration", "qwen3_5", qwen3_5_layers, _frame,
    own=_OWN, nested="text_config", names=_TEXT, other_names=((),), ignored=_IGNORED, foreign=False,
    vision=qwen3_5_vision,
)  # fmt: skip
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", qwen3_5_moe_layers, _frame,
    own=_OWN, names=ROUTER_NAMES, other_names=((*ROUTER_NAMES, *_TEXT),), ignored=_IGNORED, foreign=False,
)  # fmt: skip
QWEN3_5_MOE_PICTURES = Family(
    "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", qwen3_5_moe_layers, _frame,
    own=_OWN, nested="text_config", names=(*ROUTER_NAMES, *_TEXT), other_names=(ROUTER_NAMES,), ignored=_IGNORED,
    foreign=False, vision=qwen3_5_vision,
)  # fmt: skip
QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM", "qwen3_next", qwen3_next_layers, _frame, own=_OWN, names=ROUTER_NAMES, ignored=_IGNORED,
    foreign=False,
)  # fmt: skip
