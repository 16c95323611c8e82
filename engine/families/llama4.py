"""Llama 4: Scout and Maverick."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .family import Family, attention_spec, expert_counts, layer_count, mlp_spec
from .layer_spec import LayerSpec, MLPSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig

_FULL, _CHUNKED = "full_attention", "chunked_attention"


def llama4_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama whose rotated layers see chunks of the context and norm what they have rotated; each fourth layer is not
    rotated, sees all, and scales queries by their position. Of the experts a token goes to one, whose input is weighed,
    and to a shared one."""
    count = layer_count(raw)
    rotated = raw.optional_list("no_rope_layers") or [
        (index + 1) % raw.count("no_rope_layer_interval") != 0 for index in range(count)
    ]
    if len(rotated) < count:
        raise ModelError(f"config.json: no_rope_layers has {len(rotated)} entries for {count} layers: correct the file")
    kinds = raw.optional_list("layer_types") or [_CHUNKED if there else _FULL for there in rotated[:count]]
    if len(kinds) != count or any(kind not in (_FULL, _CHUNKED) for kind in kinds):
        raise ModelError(
            f"config.json: layer_types has {len(kinds)} entries for {count} layers, each of which must be {_FULL} or "
            f"{_CHUNKED}: correct the file"
        )
    chunk = raw.optional_count("attention_chunk_size") or 0
    plain = replace(attention_spec(raw, bias=bool(raw.get("attention_bias"))), interleaved=True)
    turned = replace(plain, qk_norm="unit" if raw.get("use_qk_norm") else "")
    if isinstance(tuning := raw.values.get("attn_temperature_tuning"), int):  # 4 in the first files
        raw = RawConfig({**raw.values, "attn_temperature_tuning": bool(tuning)}, raw.defaults)
    tuned = (raw.number("attn_scale"), raw.count("floor_scale")) if raw.get("attn_temperature_tuning") else None
    unturned = replace(plain, rope=None, temperature=tuned)
    mixture, dense, sparse = _mixture(raw), _dense(raw), _sparse(raw, count)
    return tuple(
        LayerSpec(
            replace(turned if there else unturned, window=chunk, chunked=True)
            if kind == _CHUNKED and chunk
            else (turned if there else unturned),
            mixture if index in sparse else dense,
        )
        for index, (there, kind) in enumerate(zip(rotated[:count], kinds, strict=True))
    )


def _sparse(raw: RawConfig, count: int) -> list[Any]:
    """The layers with experts."""
    step = raw.count("interleave_moe_layer_step")
    given = raw.optional_list("moe_layers")
    return list(range(step - 1, count, step)) if given is None else given


def _dense(raw: RawConfig) -> MLPSpec:
    return replace(mlp_spec(raw), inner=raw.count("intermediate_size_mlp"))


def _mixture(raw: RawConfig) -> MoESpec:
    num_experts, top_k = expert_counts(raw, "num_local_experts", "num_experts")
    if top_k != 1:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, supported is 1: use another model")
    inner = mlp_spec(raw).inner
    routing = RoutingSpec(num_experts, top_k, score="none")
    return MoESpec(inner, routing, shared_inner=inner, weighs_input=True, stored="transposed")


NAMES = ((".mlp", ".feed_forward"),)
LLAMA4 = Family("Llama4ForCausalLM", "llama4_text", llama4_layers, names=NAMES)
LLAMA4_PICTURES = Family(
    "Llama4ForConditionalGeneration",
    "llama4",
    llama4_layers,
    nested="text_config",
    names=(*NAMES, ("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    other_names=((*NAMES, ("model.", "model.language_model.")),),
    ignored=tuple(
        f"{before}{part}." for before in ("", "model.") for part in ("vision_model", "multi_modal_projector")
    ),
)
