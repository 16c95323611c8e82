"""Families most of whose layers keep recurrent states: as config.json says what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vserve.engine.cache.states import StateLayout
from vserve.engine.describe.divide import check_divides, check_stages, more_stages
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import parse_model_config
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.families.layer_spec import AttentionSpec, ConvSpec, MLPSpec, MoESpec, PairSpec, ScanSpec
from vserve.engine.options.config import EngineConfig
from vserve.engine.planning.load import divisions
from vserve.engine.planning.state_slots import check_state_heads, choose_state_dtype
from vserve.engine.planning.weight_size import smaller_weights, weight_size
from vserve.engine.quant.online import OnlineScheme
from vserve.engine.weights.loader import count_parameters

# Keys of config.json as they are published.
LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
    "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "tie_embedding": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
LFM2_8B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168,
    "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
    "conv_L_cache": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_embedding": True,
}  # fmt: skip
GRANITE_SMALL: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False,
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 768, "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 16,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "num_attention_heads": 32,
    "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000,
    "shared_intermediate_size": 1536, "tie_word_embeddings": True, "vocab_size": 100352, "dtype": "bfloat16",
}  # fmt: skip
BAMBA_9B: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [9, 18, 27],
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_heads": 128, "time_step_limit": [0.0, float("inf")],
}  # fmt: skip
NANO_3: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
    "intermediate_size": 1856, "mamba_head_dim": 64, "mamba_num_heads": 64, "mamba_ssm_cache_dtype": "float32",
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_groups": 8, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_key_value_heads": 2, "head_dim": 128, "routed_scaling_factor": 2.5, "ssm_state_size": 128, "conv_kernel": 4,
    "time_step_limit": [0.0, float("inf")], "time_step_min": 0.001, "vocab_size": 131072,
}  # fmt: skip
FALCON_7B: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 3072, "head_dim": 128,
    "intermediate_size": 12288, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_groups": 1,
    "mamba_n_heads": 24, "mamba_rms_norm": False, "num_attention_heads": 12, "num_hidden_layers": 44,
    "num_key_value_heads": 2, "rope_theta": 100000000000.0, "key_multiplier": 0.27, "attention_in_multiplier": 1.0,
    "ssm_multipliers": [0.35, 0.25, 0.125, 0.5, 0.35], "ssm_in_multiplier": 1.25, "lm_head_multiplier": 0.0195,
    "embedding_multiplier": 5.656854249492381, "mlp_multipliers": [0.883, 0.5859], "ssm_out_multiplier": 0.2357,
    "attention_out_multiplier": 0.9375,
}  # fmt: skip
MAMBA = (GRANITE_SMALL, BAMBA_9B, NANO_3, FALCON_7B)


def slot_bytes(config: ModelConfig) -> int:
    layout = StateLayout.of(config.state_specs(), 0, choose_dtype(config))
    assert layout is not None
    return layout.slot_bytes(2)


def choose_dtype(config: ModelConfig) -> Any:
    return getattr(torch, choose_state_dtype(EngineConfig("x"), config))


def test_lfm2() -> None:
    config = parse_model_config(LFM2_1_2B)
    attending = [index for index, layer in enumerate(config.layers) if layer.attention is not None]
    assert attending == LFM2_1_2B["full_attn_idxs"] and config.tie_word_embeddings and config.norm_eps == 1e-5
    assert {layer.mlp for layer in config.layers} == {MLPSpec(8192)}
    assert {layer.mixer for layer in config.layers if layer.state is not None} == {ConvSpec(2048, 3)}
    assert config.layers[2].attention.rope.theta == 1e6
    assert len(config.kv_specs()) == 6 and len(config.state_specs()) == 10
    assert slot_bytes(config) == 10 * 4 * 2048 * 2  # rings of four positions, and no matrices
    check_state_heads(config)


def test_lfm2_moe() -> None:
    config = parse_model_config(LFM2_8B)
    assert [isinstance(layer.mlp, MoESpec) for layer in config.layers] == [False] * 2 + [True] * 22
    routing = config.layers[-1].mlp.routing
    assert (routing.num_experts, routing.top_k, routing.score, routing.correction) == (32, 4, "sigmoid", True)
    assert len(config.kv_specs()) == 6


def test_granite_4_h_small() -> None:
    config = parse_model_config(GRANITE_SMALL)
    assert [index for index, layer in enumerate(config.layers) if layer.attention is not None] == [5, 15, 25, 35]
    assert config.layers[5].attention == AttentionSpec(32, 8, 128, None, scale=0.0078125)
    assert config.layers[0].mixer == ScanSpec(128, 64, 128, 1, 4)
    assert {layer.mlp.shared_inner for layer in config.layers} == {1536}
    assert slot_bytes(config) == 36 * (128 * 64 * 128 * 4 + 8 * (8192 + 256 + 128) * 2)
    check_state_heads(config)
    dense = parse_model_config(GRANITE_SMALL | {"num_local_experts": 0, "position_embedding_type": "rope"})
    assert {layer.mlp for layer in dense.layers} == {MLPSpec(1536, fused=True)} and dense.layers[5].attention.rope


def test_bamba_rotates_half_of_a_head() -> None:
    config = parse_model_config(BAMBA_9B)
    assert [index for index, layer in enumerate(config.layers) if layer.attention is not None] == [9, 18, 27]
    assert config.layers[9].attention.rotary_dim == 64 and config.layers[0].mixer.limits == (0.0, float("inf"))
    written = parse_model_config(BAMBA_9B | {"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert written == parse_model_config(BAMBA_9B | {"mamba_d_head": "auto"}) == config


def test_nemotron_3_nano() -> None:
    config = parse_model_config(NANO_3)
    assert (len(config.kv_specs()), len(config.state_specs()), len(config.layers)) == (6, 23, 52)
    assert all((layer.mixer is None) != (layer.mlp is None) for layer in config.layers)
    assert config.layers[0].mixer == ScanSpec(64, 64, 128, 8, 4) and config.layers[5].attention.rope is None
    mixture = config.layers[1].mlp
    assert (mixture.inner, mixture.shared_inner, mixture.gated, mixture.latent) == (1856, 3712, False, 0)
    assert slot_bytes(config) == 23 * (64 * 64 * 128 * 4 + 8 * (4096 + 2048 + 64) * 2)
    assert 31e9 < count_parameters(config) < 32e9
    assert parse_model_config(NANO_3 | {"moe_latent_size": 1024}).layers[1].mlp.latent == 1024
    dense = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "attention_head_dim": 64}
    layers = parse_model_config(dense).layers
    assert layers[1].mlp == MLPSpec(21504, activation="relu2", gated=False) and layers[3].attention.head_dim == 64


def test_heads_of_nemotron_nano_2_have_tiles() -> None:
    """Which are 80 channels wide."""
    nano_2 = NANO_3 | {"hybrid_override_pattern": "M-M*-", "mamba_num_heads": 128, "mamba_head_dim": 80}
    check_state_heads(parse_model_config(nano_2))
    for keys in ({"mamba_head_dim": 72}, {"ssm_state_size": 80}):
        with pytest.raises(ConfigError, match="a power of two, and a multiple of 16 of at least 16 are computed"):
            check_state_heads(parse_model_config(nano_2 | keys))


def test_falcon_h1_has_both_in_every_layer() -> None:
    config = parse_model_config(FALCON_7B)
    (layer,) = set(config.layers)
    assert isinstance(layer.mixer, PairSpec) and len(config.kv_specs()) == len(config.state_specs()) == 44
    assert layer.mixer.attention.scale == pytest.approx(128**-0.5 * 0.27)
    assert layer.mixer.scan.multipliers == (1.25 * 0.35, 1.25 * 0.25, 1.25 * 0.125, 1.25 * 0.5, 1.25 * 0.35)
    assert layer.mixer.scales == (0.9375, 0.2357) and layer.mlp.multipliers == (0.883, 0.5859)
    assert layer.mixer.scan.norm == "" and config.frame.embedding_scale == 5.656854249492381


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (GRANITE_SMALL | {"mamba_n_groups": 3}, "128 heads of Mamba-2 are no multiple of its 3 groups"),
        (GRANITE_SMALL | {"mamba_d_head": 32}, "128 heads of Mamba-2 with 32 channels each are not the 8192"),
        (GRANITE_SMALL | {"layer_types": ["mamba"] * 40}, "no layer is of the type full_attention"),
        (BAMBA_9B | {"time_step_limit": [0.5, 0.1]}, "time_step_limit is [0.5, 0.1], two numbers from 0 on"),
        (BAMBA_9B | {"mamba_d_conv": 1}, "mamba_d_conv is 1, from 2 to 8 are run"),
        (
            NANO_3 | {"hybrid_override_pattern": "MX*"},
            "of the kinds linear_attention, moe, full_attention, mlp are run",
        ),
        (NANO_3 | {"hybrid_override_pattern": "ME"}, "no layer is of the type full_attention"),
        (NANO_3 | {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', supported is relu2"),
        (NANO_3 | {"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype is 'int8', supported are float32"),
        (FALCON_7B | {"projectors_bias": True}, "projectors_bias is set, which is not supported"),
        (FALCON_7B | {"ssm_multipliers": [1.0]}, "ssm_multipliers is [1.0], 5 numbers belong there"),
        (LFM2_1_2B | {"conv_L_cache": 9}, "conv_L_cache is 9, from 2 to 8 are run"),
        (LFM2_1_2B | {"full_attn_idxs": []}, "no layer is of the type full_attention"),
        (LFM2_1_2B | {"layer_types": ["conv", "mamba"] * 8}, "each of which must be full_attention or conv"),
        (LFM2_1_2B | {"tie_embedding": False}, "tie_embedding and tie_word_embeddings, which is read, differ"),
    ],
)
def test_configurations_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config(keys)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [LFM2_1_2B, *MAMBA], ids=lambda raw: raw["model_type"])
def test_they_are_cut_and_not_divided(raw: dict[str, Any]) -> None:
    config = parse_model_config(raw)
    layer = "a layer of (Mamba-2|short convolutions) cannot be divided over 2 ranks: leave it out"
    with pytest.raises(ModelError, match=rf"--tensor-parallel-size 2: {layer}, or take --data-parallel-size 2 .*pipel"):
        check_divides(config, 2)
    check_stages(config, 2)


def test_a_stage_needs_attention_and_a_state() -> None:
    config = parse_model_config(NANO_3)
    with pytest.raises(ModelError, match="stage 1 would have no layer with attention, and of such a model each needs"):
        check_stages(config, 2, (5, 47))


@pytest.mark.parametrize("raw", [LFM2_8B, *MAMBA], ids=lambda raw: raw["model_type"])
def test_only_stages_that_can_be_are_named(raw: dict[str, Any]) -> None:
    """By `vserve plan`, and where memory is short."""
    config, asked = parse_model_config(raw), EngineConfig("x")
    counts = [division.pipeline_parallel_size for division in divisions(config, asked)]
    assert counts[:2] == [1, 2] and (8 in counts) == (raw is FALCON_7B)
    for count in counts:
        check_stages(config, count)
    size, *_ = more_stages(config, 1, 100, -86)  # eight would have room
    assert (size == 8) == (raw is FALCON_7B)
    check_stages(config, size or 1)


def test_experts_without_gates_are_not_said_to_shrink() -> None:
    config, half = parse_model_config(NANO_3), torch.bfloat16
    every = count_parameters(config)
    assert not list(smaller_weights(config, every, half, 2 * every, every * 3 // 2, on_card=True))
    assert next(iter(smaller_weights(config, every, half, 2 * every, 2 * every - 1, on_card=True))).startswith(
        "add -q fp8"
    )
    stored = replace(config, quantization=OnlineScheme("int4"))
    assert not list(smaller_weights(stored, every, half, every // 2, every, on_card=True)), "no order is to blame"
    alone = replace(config, quantization=OnlineScheme("int8", experts_alone=True))
    assert weight_size(alone, every, half, 0, on_card=True) == 2 * every


def test_inputs_of_convolutions_have_the_type_of_activations() -> None:
    config = parse_model_config(LFM2_1_2B)
    with pytest.raises(ConfigError, match=r"float16: Lfm2ForCausalLM keeps no .* but inputs of convolutions: leave"):
        choose_state_dtype(EngineConfig("x", mamba_ssm_cache_dtype="float16"), config)
