"""Granite 4 H, Bamba, Falcon-H1 and Nemotron-H: Mamba-2 in most layers, or in all, with some attention."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, Literal

from ..errors import ModelError
from .family import (
    MAX_LAYERS,
    Family,
    activation_of,
    attention_spec,
    check_attends,
    conv_width,
    expert_counts,
    layer_count,
    layer_kinds,
    mlp_spec,
    named,
)
from .layer_spec import DTYPES, FrameSpec, LayerSpec, MLPSpec, MoESpec, PairSpec, RoutingSpec, ScanSpec
from .llama import GRANITE_MOE_NAMES, granite_frame, granite_mixture
from .raw_config import RawConfig
from .rope_config import FULL

SCAN = "linear_attention"  # as transformers calls it now; files on the hub say mamba and attention
_OLD = {"mamba": SCAN, "attention": FULL}
_OWN = {"mamba_d_head": None}  # a number or "auto"
Norm = Literal["", "gate_first", "norm_first"]


def _scan(raw: RawConfig, inner: int, norm: Norm = "gate_first", **more: Any) -> ScanSpec:
    """By the keys that most of these models have. Raises ModelError."""
    heads, groups = raw.count("mamba_n_heads"), raw.count("mamba_n_groups")
    dim = inner // heads if raw.get("mamba_d_head") in (None, "auto") else raw.count("mamba_d_head")
    bias = bool(raw.get("mamba_proj_bias"))
    return checked_scan(
        ScanSpec(
            heads, dim, raw.count("mamba_d_state"), groups, conv_width(raw, "mamba_d_conv"),
            bool(raw.get("mamba_conv_bias")), bias, bias, norm, time_limits(raw), **more,
        ),
        inner,
    )  # fmt: skip


def checked_scan(spec: ScanSpec, inner: int) -> ScanSpec:
    """Raises ModelError where its sizes contradict each other. inner: of all heads, as config.json has it."""
    if spec.inner != inner:
        raise ModelError(
            f"config.json: {spec.num_heads} heads of Mamba-2 with {spec.head_dim} channels each are not the {inner} of "
            "its inner size: correct the file"
        )
    if spec.num_heads % spec.num_groups:
        raise ModelError(
            f"config.json: {spec.num_heads} heads of Mamba-2 are no multiple of its {spec.num_groups} groups: correct "
            "the file"
        )
    return spec


def time_limits(raw: RawConfig) -> tuple[float, float]:
    """Of a token's time step. Raises ModelError."""
    found = raw.optional_list("time_step_limit")
    if found is None:
        return 0.0, inf
    found = [inf if value == {"__float__": "Infinity"} else value for value in found]  # as transformers writes it
    numbers = [value for value in found if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(found) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise ModelError(
            f"config.json: time_step_limit is {found!r:.60}, two numbers from 0 on belong there, the smaller one "
            "first: correct the file"
        )
    return float(numbers[0]), float(numbers[1])


def _mamba_inner(raw: RawConfig) -> int:
    activation_of(raw, "hidden_act")
    return raw.count("mamba_expand") * raw.count("hidden_size")


def _with_new_names(raw: RawConfig, key: str) -> RawConfig:
    kinds = raw.optional_list(key) or [SCAN] * layer_count(raw)
    renamed = [_OLD.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    return RawConfig({**raw.values, key: renamed}, raw.defaults)


def granite_hybrid_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Granite's multipliers; attention mostly without rotation; experts beside a shared MLP, or that alone."""
    kinds = layer_kinds(_with_new_names(raw, "layer_types"), "layer_types", [], (SCAN, FULL))
    check_attends(kinds, FULL)
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")))
    rotated = raw.get("position_embedding_type") == "rope"
    attention = replace(attention, scale=raw.number("attention_multiplier"), rope=attention.rope if rotated else None)
    scan = _scan(raw, _mamba_inner(raw))
    shared = raw.size("shared_intermediate_size")
    mlp = granite_mixture(raw) if raw.size("num_local_experts") else MLPSpec(shared, fused=True)
    scale = raw.number("residual_multiplier")
    return tuple(LayerSpec(scan if kind == SCAN else attention, mlp, residual_scale=scale) for kind in kinds)


GRANITE_HYBRID = Family(
    "GraniteMoeHybridForCausalLM", "granitemoehybrid", granite_hybrid_layers, granite_frame,
    names=(
        *GRANITE_MOE_NAMES,
        (".mlp.gate_up_proj", ".shared_mlp.input_linear"),
        (".mlp.down_proj", ".shared_mlp.output_linear"),
    ),
    own=_OWN, foreign=False,
)  # fmt: skip


def bamba_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Half of each head is rotated."""
    attending = raw.optional_list("attn_layer_indices") or []
    kinds = [FULL if index in attending else SCAN for index in range(layer_count(raw))]
    check_attends(kinds, FULL)
    attention = attention_spec(raw, bias=bool(raw.get("attention_bias")), rotated=0.5)
    scan, mlp = _scan(raw, _mamba_inner(raw)), mlp_spec(raw, bias=bool(raw.get("mlp_bias")))
    return tuple(LayerSpec(scan if kind == SCAN else attention, mlp) for kind in kinds)


_FEED_FORWARD = (
    (".mlp.", ".feed_forward."),
    (".post_attention_layernorm", ".pre_ff_layernorm"),
    ("model.norm", "model.final_layernorm"),
)
BAMBA = Family("BambaForCausalLM", "bamba", bamba_layers, own=_OWN, names=_FEED_FORWARD, foreign=False)


def falcon_h1_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Attention and Mamba-2 beside each other in every layer, with multipliers of what goes into and out of both."""
    keys, into, out, into_scan, out_of_scan = (
        raw.optional_number(key) or 1.0
        for key in (
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        )
    )
    for key in ("attention_bias", "mamba_proj_bias", "projectors_bias", "mlp_bias"):
        if raw.get(key):
            raise ModelError(f"config.json: {key} is set, which is not supported beside multipliers: use another model")
    activation_of(raw, "hidden_act")
    attention = attention_spec(raw)
    # Queries and keys are made of the input, and so are values: what it is multiplied by comes out again behind them.
    scale = attention.head_dim**-0.5 * into**2 * keys
    of_parts = _numbers(raw, "ssm_multipliers", 5)
    multipliers = tuple(into_scan * factor for factor in of_parts)
    inner = raw.optional_count("mamba_d_ssm") or raw.count("mamba_expand") * raw.count("hidden_size")
    norm: Norm = "" if not raw.get("mamba_rms_norm") else "gate_first"
    if norm and raw.get("mamba_norm_before_gate"):
        norm = "norm_first"
    scan = _scan(raw, inner, norm, multipliers=() if set(multipliers) == {1.0} else multipliers)
    pair = PairSpec(replace(attention, scale=scale), scan, (into * out, out_of_scan))
    first, second = _numbers(raw, "mlp_multipliers", 2)
    return (LayerSpec(pair, replace(mlp_spec(raw), multipliers=(first, second))),) * layer_count(raw)


def _numbers(raw: RawConfig, key: str, count: int) -> list[float]:
    """So many numbers; ones where there are none. Raises ModelError."""
    found = raw.optional_list(key)
    if found is None:
        return [1.0] * count
    if len(found) != count or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in found
    ):
        raise ModelError(f"config.json: {key} is {found!r:.60}, {count} numbers belong there: correct the file")
    return [float(value) for value in found]


def falcon_h1_frame(raw: RawConfig) -> FrameSpec:
    return FrameSpec(
        embedding_scale=raw.optional_number("embedding_multiplier") or 1.0,
        logit_scale=raw.optional_number("lm_head_multiplier") or 1.0,
    )


FALCON_H1 = Family(
    "FalconH1ForCausalLM", "falcon_h1", falcon_h1_layers, falcon_h1_frame, own=_OWN, names=_FEED_FORWARD,
    foreign=False,
)  # fmt: skip


_BLOCKS = {"M": SCAN, "E": "moe", "*": FULL, "-": "mlp"}  # of hybrid_override_pattern; the order is the default's


def _blocks(raw: RawConfig) -> list[str]:
    """Of each layer, which is a mixer or an MLP alone. Raises ModelError."""
    pattern = raw.get("hybrid_override_pattern")
    found = raw.optional_list("layers_block_type") or raw.optional_list("layer_types")
    if found is None and pattern:
        found = [_BLOCKS.get(letter, letter) for letter in pattern]
    kinds = [_OLD.get(kind, kind) if isinstance(kind, str) else kind for kind in found or list(_BLOCKS.values())]
    wrong = next((kind for kind in kinds if kind not in _BLOCKS.values()), None)
    if wrong is not None or not kinds or len(kinds) > MAX_LAYERS:
        key = "layers_block_type" if found is not None and not pattern else "hybrid_override_pattern"
        known = ", ".join(_BLOCKS.values())
        raise ModelError(
            f"config.json: {key} has {len(kinds)} layers, 1 to {MAX_LAYERS} of the kinds {known} are run"
            f"{'' if wrong is None else f', and not {wrong!r:.40}'}: correct the file"
        )
    check_attends(kinds, FULL)
    return kinds


def _mixture(raw: RawConfig) -> MoESpec:
    """Experts without gates, chosen by sigmoids with a bias, and a shared one; they may read a shorter vector."""
    num_experts, top_k = expert_counts(raw, "n_routed_experts", "num_local_experts")
    if raw.get("mlp_bias"):
        raise ModelError("config.json: mlp_bias is set, which is not supported beside experts: use another model")
    routing = RoutingSpec(
        num_experts, top_k, score="sigmoid", correction=True, num_groups=raw.count("n_group"),
        kept_groups=raw.count("topk_group"), group_score="top2", renormalize=bool(raw.get("norm_topk_prob")),
        epsilon=1e-20, factor=raw.number("routed_scaling_factor"), fp32=True,
    )  # fmt: skip
    shared = raw.count("moe_shared_expert_intermediate_size") if raw.size("n_shared_experts") else 0
    return MoESpec(
        raw.count("moe_intermediate_size"), routing, shared, activation="relu2", gated=False,
        latent=raw.optional_count("moe_latent_size") or 0,
    )  # fmt: skip


def nemotron_h_layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Layers of one mixer, or one MLP, each behind one norm; attention without rotation, MLPs without gates.

    time_step_min is what time steps began with in training, and no limit of them: the kernels that these models were
    trained with have none, nor has transformers when it decodes.
    """
    activation_of(raw, "mamba_hidden_act")
    if raw.optional_count("head_dim") is None or "attention_head_dim" in raw.values:
        size = raw.optional_count("attention_head_dim") or raw.defaults["head_dim"]
        raw = RawConfig({**raw.values, "head_dim": raw.values.get("head_dim") or size}, raw.defaults)
    attention = replace(attention_spec(raw, bias=bool(raw.get("attention_bias"))), rope=None)
    heads, dim, bias = raw.count("mamba_num_heads"), raw.count("mamba_head_dim"), bool(raw.get("use_bias"))
    scan = checked_scan(
        ScanSpec(
            heads, dim, raw.count("ssm_state_size"), raw.count("n_groups"), conv_width(raw, "conv_kernel"),
            bool(raw.get("use_conv_bias")), bias, bias, "gate_first", time_limits(raw),
            state_dtype=named(raw, "mamba_ssm_cache_dtype", DTYPES),
        ),
        heads * dim,
    )  # fmt: skip
    activation = activation_of(raw, "mlp_hidden_act", {"relu2": "relu2"})
    mlp = MLPSpec(raw.count("intermediate_size"), bool(raw.get("mlp_bias")), activation, gated=False)
    kinds = _blocks(raw)
    layers = {SCAN: LayerSpec(scan, None), FULL: LayerSpec(attention, None), "mlp": LayerSpec(None, mlp)}
    if "moe" in kinds:
        layers["moe"] = LayerSpec(None, _mixture(raw))
    return tuple(layers[kind] for kind in kinds)


NEMOTRON_H = Family(
    "NemotronHForCausalLM", "nemotron_h", nemotron_h_layers, norm_eps="layer_norm_epsilon",
    own={"num_hidden_layers": 4, "hybrid_override_pattern": "", "layer_types": None, "attention_head_dim": None},
    names=(
        ("model.embed_tokens", "model.embeddings"),
        ("model.norm", "model.norm_f"),
        (".input_layernorm", ".norm"),
        (".self_attn.", ".mixer."),
        (".mamba", ".mixer"),
        (".mlp.router", ".mixer.gate"),
        (".mlp.shared_expert.", ".mixer.shared_experts."),
        (".mlp.", ".mixer."),
        ("model.", "backbone."),
    ),
    ignored=("mtp.",),
    foreign=False,
)  # fmt: skip
