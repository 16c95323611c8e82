"""Mixtures whose experts are chosen by sigmoids: MiniMax M2 to M2.7, MiMo-V2-Flash, Hunyuan 3, Laguna."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .deepseek import EXPERTS, sigmoid_mixture
from .family import Family, attention_spec, expert_counts, layer_count, layer_kinds, mlp_spec, named_windows
from .layer_spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig
from .rope_config import FULL, SLIDING, read_ropes

_EPSILON = 1e-20


def minimax_m2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with norms over all query and over all key heads and a part of each head rotated; experts, chosen with a
    bias, whose weights sum to 1."""
    if (width := raw.optional_count("rotary_dim")) is not None:  # how files on the hub say it
        share = width / (raw.optional_count("head_dim") or raw.count("hidden_size") // raw.count("num_attention_heads"))
        raw = RawConfig({**raw.values, "partial_rotary_factor": share}, raw.defaults)
    for key, known in (("scoring_func", ("sigmoid",)), ("qk_norm_type", ("per_layer",))):
        if (value := raw.get(key)) not in known:
            raise ModelError(f"config.json: {key} is {value!r}, supported is {known[0]}: use another model")
    attention = attention_spec(raw, rotated=1.0)
    attention = replace(attention, qk_norm="width" if raw.get("use_qk_norm") else "")
    num_experts, top_k = expert_counts(raw, "num_local_experts", "num_experts")
    routing = RoutingSpec(
        num_experts, top_k, score="sigmoid", correction=bool(raw.get("use_routing_bias")), renormalize=True, fp32=True,
        correction_apart=True,
    )  # fmt: skip
    return (LayerSpec(attention, MoESpec(mlp_spec(raw).inner, routing)),) * layer_count(raw)


# Of config.json on the hub, beside what transformers' class has.
_M2 = {
    "rotary_dim": None, "scoring_func": "sigmoid", "qk_norm_type": "per_layer", "use_qk_norm": True,
    "use_routing_bias": True, "num_mtp_modules": 0,
}  # fmt: skip
MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    minimax_m2_layers,
    own=_M2,
    names=(
        (".mlp.router", ".mlp.gate"),
        (".mlp", ".block_sparse_moe"),
        (".gate_proj", ".w1"),
        (".up_proj", ".w3"),
        (".down_proj", ".w2"),
    ),
    drafts="num_mtp_modules",
)


def _dense_then_sparse(raw: RawConfig, mixture: MoESpec) -> list[MLPSpec | MoESpec]:
    """As mlp_layer_types says, or without it in all layers but the first."""
    default = ["dense"] + ["sparse"] * (layer_count(raw) - 1)
    kinds = layer_kinds(raw, "mlp_layer_types", default, ("dense", "sparse"))
    return [mlp_spec(raw) if kind == "dense" else mixture for kind in kinds]


def _two_attentions(raw: RawConfig, ropes: dict[str, Any]) -> tuple[AttentionSpec, AttentionSpec]:
    """Of layers without and with a window, which are rotated in their own ways and shares. ropes: where config.json
    has none."""
    given = raw.get("rope_parameters") or ropes
    if not isinstance(given, dict) or FULL not in given:
        raise ModelError(
            f"config.json: rope_parameters is {given!r:.60}, an object with {FULL} and {SLIDING} belongs there: "
            "correct the file"
        )
    found = []
    for name, rope in zip(
        (FULL, SLIDING),
        read_ropes({**raw.values, "rope_parameters": given}, raw.count("max_position_embeddings"), raw.default_theta),
        strict=True,
    ):
        values = {**raw.values, "rope_parameters": given.get(name) if isinstance(given, dict) else None}
        spec = attention_spec(RawConfig(values, raw.defaults), rope=rope, rotated=1.0)
        found.append(replace(spec, qkv_bias=bool(raw.get("attention_bias"))))
    return found[0], found[1]


def mimo_v2_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Layers with a window have sinks and twice as many key heads; a third of each head is rotated, values are shorter
    than keys, and scaled; DeepSeek-V3's experts behind the first layer, without a shared one."""
    count = layer_count(raw)
    old = raw.optional_list("hybrid_layer_pattern")  # how files on the hub say it: 1 with a window
    if old is not None and raw.get("layer_types") is None:
        raw = RawConfig({**raw.values, "layer_types": [SLIDING if kind else FULL for kind in old]}, raw.defaults)
    dense = raw.optional_list("moe_layer_freq")
    if dense is not None and raw.get("mlp_layer_types") is None:
        kinds = ["sparse" if kind else "dense" for kind in dense]
        raw = RawConfig({**raw.values, "mlp_layer_types": kinds}, raw.defaults)
    share = raw.optional_number("partial_rotary_factor") or 0.334
    ropes = {
        name: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
        for name, theta in ((FULL, raw.number("rope_theta")), (SLIDING, raw.number("swa_rope_theta")))
    }
    given = raw.values.get("rope_scaling") or raw.get("rope_parameters") or {}
    if isinstance(given, dict) and FULL in given:
        ropes = given
    elif isinstance(given, dict):  # of layers without a window
        base = {key: value for key, value in ropes[FULL].items() if key != "rope_type"}
        ropes[FULL] = {**base, **given}
    raw = RawConfig({**raw.values, "rope_scaling": None, "rope_parameters": ropes}, raw.defaults)
    if (epsilon := raw.optional_number("layernorm_epsilon")) not in (None, raw.number("rms_norm_eps")):
        raise ModelError(
            f"config.json: layernorm_epsilon is {epsilon}, and rms_norm_eps, which is read, another number: set it to "
            "the same"
        )
    full, sliding = _two_attentions(raw, ropes)
    shape: dict[str, Any] = {
        "value_dim": raw.count("v_head_dim"),
        "value_scale": raw.optional_number("attention_value_scale") or 1.0,
        "sinks_name": "attention_sink_bias",
    }
    for key, wanted in (("swa_head_dim", full.head_dim), ("swa_v_head_dim", shape["value_dim"])):
        if (found := raw.optional_count(key)) not in (None, wanted):
            raise ModelError(f"config.json: {key} is {found}, supported is that of other layers: use another model")
    keys = raw.optional_count("swa_num_key_value_heads") or 2 * full.num_kv_heads
    window = raw.optional_count("sliding_window_size") or raw.count("sliding_window") - 1  # beside the query
    full = replace(full, sinks=bool(raw.get("add_full_attention_sink_bias")), **shape)
    sliding = replace(
        sliding, num_kv_heads=keys, window=window + 1, sinks=bool(raw.get("add_swa_attention_sink_bias")), **shape
    )
    default = [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(count)]
    windows = layer_kinds(raw, "layer_types", default, (FULL, SLIDING))
    if raw.get("routed_scaling_factor") is None:
        raw = RawConfig({**raw.values, "routed_scaling_factor": 1.0}, raw.defaults)
    mlps = _dense_then_sparse(raw, sigmoid_mixture(raw))
    return tuple(LayerSpec(full if kind == FULL else sliding, mlp) for kind, mlp in zip(windows, mlps, strict=True))


MIMO_V2 = Family(
    "MiMoV2FlashForCausalLM",
    "mimo_v2_flash",
    mimo_v2_layers,
    own=EXPERTS | {
        "n_shared_experts": 0, "hybrid_layer_pattern": None, "moe_layer_freq": None, "rope_theta": 5_000_000.0,
        "swa_rope_theta": 10_000.0, "partial_rotary_factor": None, "swa_head_dim": None, "swa_v_head_dim": None,
        "swa_num_key_value_heads": None, "sliding_window_size": None, "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True, "rope_parameters": None, "layernorm_epsilon": None,
    },
    names=((".mlp.router", ".mlp.gate"),),
    ignored=("model.mtp.", "mtp."),
)  # fmt: skip


def hy_v3_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 3's attention; behind the first layers experts, chosen with a bias, and a shared one."""
    bias = bool(raw.get("attention_bias"))
    attention = replace(attention_spec(raw, bias=bias), qk_norm="head")
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    inner, shared = raw.count("moe_intermediate_size"), raw.size("num_shared_experts")
    routing = RoutingSpec(
        num_experts, top_k, score="sigmoid", correction=True, renormalize=True, epsilon=_EPSILON,
        factor=raw.number("router_scaling_factor"), fp32=True, correction_name="expert_bias", correction_apart=True,
    )  # fmt: skip
    mixture = MoESpec(inner, routing, shared_inner=shared * inner)
    if raw.get("mlp_layer_types") is None and raw.get("first_k_dense_replace") is not None:
        dense = raw.size("first_k_dense_replace")
        kinds = ["dense" if index < dense else "sparse" for index in range(layer_count(raw))]
        raw = RawConfig({**raw.values, "mlp_layer_types": kinds}, raw.defaults)
    return tuple(LayerSpec(attention, mlp) for mlp in _dense_then_sparse(raw, mixture))


HY_V3 = Family(
    "HYV3ForCausalLM",
    "hy_v3",
    hy_v3_layers,
    own={"first_k_dense_replace": None, "num_nextn_predict_layers": 1},
    names=((".mlp.router", ".mlp.router.gate"), (".mlp.shared_expert.", ".mlp.shared_mlp.")),
    drafts="num_nextn_predict_layers",
)


def laguna_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Qwen 3's attention with its own rotation, and number of heads, in layers with a window, its results gated; behind
    the first layer experts, chosen with a bias, and a shared one."""
    full, sliding = _two_attentions(
        raw,
        {
            FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
    )
    gating = raw.values.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise ModelError(
            f"config.json: gating is {gating!r:.60}, supported are per-head and per-element: use another model"
        )
    if raw.get("moe_apply_router_weight_on_input"):
        raise ModelError(
            "config.json: moe_apply_router_weight_on_input is set, which is not supported: use another model"
        )
    if raw.values.get("swa_attention_sink_enabled"):
        raise ModelError(
            "config.json: swa_attention_sink_enabled is set, which is not supported for this architecture: use another "
            "model"
        )
    gate = "element" if gating == "per-element" else "head"
    shape: dict[str, Any] = {"qk_norm": "head", "gate": gate, "output_bias": bool(raw.get("attention_bias"))}
    count = layer_count(raw)
    heads = raw.optional_list("num_attention_heads_per_layer") or [full.num_heads] * count
    if len(heads) != count or any(type(n) is not int or n < 1 or n % full.num_kv_heads for n in heads):
        raise ModelError(
            f"config.json: num_attention_heads_per_layer has {len(heads)} entries for {count} layers, each of which "
            f"must be a multiple of num_key_value_heads {full.num_kv_heads}: correct the file"
        )
    num_experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    routing = RoutingSpec(
        num_experts, top_k, score="sigmoid", correction=True, renormalize=True,
        factor=raw.number("moe_routed_scaling_factor"), fp32=True,
        logit_cap=raw.number("moe_router_logit_softcapping") if raw.get("moe_router_logit_softcapping") else 0.0,
        correction_name="experts.e_score_correction_bias", correction_apart=True,
    )  # fmt: skip
    mixture = MoESpec(raw.count("moe_intermediate_size"), routing, raw.count("shared_expert_intermediate_size"))
    windows = named_windows(raw, raw.count("sliding_window")) or (0,) * count
    return tuple(
        LayerSpec(replace(sliding if window else full, num_heads=own, window=window, **shape), mlp)
        for own, window, mlp in zip(heads, windows, _dense_then_sparse(raw, mixture), strict=True)
    )


LAGUNA = Family(
    "LagunaForCausalLM",
    "laguna",
    laguna_layers,
    own={"rope_parameters": None},
    names=((".mlp.router", ".mlp.gate"),),
)
