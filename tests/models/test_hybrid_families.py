"""Families most of whose layers keep recurrent states: as config.json says what they are."""

from __future__ import annotations

from typing import Any

import pytest

from vserve.engine.cache.states import StateLayout
from vserve.engine.describe.divide import check_divides, check_stages
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import parse_model_config
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.families.layer_spec import ConvSpec, MLPSpec, MoESpec
from vserve.engine.options.config import EngineConfig
from vserve.engine.planning.state_slots import check_state_heads, choose_state_dtype

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


def slot_bytes(config: ModelConfig) -> int:
    layout = StateLayout.of(config.state_specs(), 0, choose_dtype(config))
    assert layout is not None
    return layout.slot_bytes(2)


def choose_dtype(config: ModelConfig) -> Any:
    import torch

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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
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


@pytest.mark.parametrize("raw", [LFM2_1_2B])
def test_they_are_neither_divided_nor_cut(raw: dict[str, Any]) -> None:
    config = parse_model_config(raw)
    with pytest.raises(ModelError, match=r"--tensor-parallel-size 2: .*take --data-parallel-size 2"):
        check_divides(config, 2)
    with pytest.raises(ModelError, match="keeps recurrent states, and such a model is not cut into stages"):
        check_stages(config, 2)


def test_inputs_of_convolutions_have_the_type_of_activations() -> None:
    config = parse_model_config(LFM2_1_2B)
    with pytest.raises(ConfigError, match=r"float16: Lfm2ForCausalLM keeps no .* but inputs of convolutions: leave"):
        choose_state_dtype(EngineConfig("x", mamba_ssm_cache_dtype="float16"), config)
