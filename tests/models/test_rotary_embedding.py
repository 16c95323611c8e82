"""The rotary table against transformers' own frequencies, at the sizes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vserve.engine.describe.reading import parse_model_config
from vserve.engine.layers.rope import RotaryEmbedding, inverse_frequencies
from vserve.engine.models.blocks import CausalLM
from vserve.engine.quant.weights import Placement

REAL: dict[str, dict[str, Any]] = {
    "llama-2": {"max_position_embeddings": 4096, "rope_theta": 10000.0},
    "llama-3.2": {"rope_theta": 500000.0, "max_position_embeddings": 131072, "head_dim": 64, "rope_scaling":
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}},
    "qwen-yarn": {"rope_theta": 1e6, "max_position_embeddings": 32768, "rope_scaling":
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "yarn-mscale": {"max_position_embeddings": 163840, "rope_scaling":
        {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7,
         "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    "yarn-temperature": {"max_position_embeddings": 4096, "rope_scaling":
        {"type": "yarn", "factor": 8.0, "attention_factor": 1.3}},
    "yarn-short": {"max_position_embeddings": 64, "head_dim": 16, "rope_scaling": {"type": "yarn", "factor": 8.0}},
    "linear": {"max_position_embeddings": 16384, "rope_theta": 100000, "rope_scaling":
        {"type": "linear", "factor": 4.0}},
    "dynamic": {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_table_equals_transformers(name: str) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **REAL[name]}
    ours = parse_model_config(raw)
    length = 300
    head_dim = ours.layers[0].attention.head_dim
    table = RotaryEmbedding(ours.layers[0].attention.rope, head_dim, length, torch.device("cpu")).cos_sin
    assert table.dtype is torch.float32 and table.shape == (length, head_dim)
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **REAL[name]))
    cos, sin = theirs(torch.empty(0), torch.arange(length)[None])
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=2e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=2e-6)


@pytest.mark.parametrize("max_len", [1000, 4096, 8192, 20000])
def test_dynamic_base_follows_the_longest_context(max_len: int) -> None:
    """Beyond the original length: what transformers would use for a sequence of max_len tokens."""
    config = AutoConfig.for_model("llama", **REAL["dynamic"])
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=max_len)
    rope = parse_model_config({"model_type": "llama", **REAL["dynamic"]}).layers[0].attention.rope
    found, magnitude = inverse_frequencies(rope, 128, max_len)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert magnitude == 1.0


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.3}, {"factor": 1.0}], ids=str)
@pytest.mark.parametrize("max_len", [100, 4096, 4097, 131072])
def test_longrope_is_fixed_by_the_longest_context(max_len: int, extra: dict[str, float]) -> None:
    """What transformers has for a sequence of max_len tokens: 96 of 128 elements are rotated."""
    factors = {"short_factor": [1.0 + i / 50 for i in range(48)], "long_factor": [1.5 + i for i in range(48)]}
    raw = {
        "model_type": "phi3", "num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope", **factors, **extra},
    }  # fmt: skip
    attention = parse_model_config(raw).layers[0].attention
    assert attention.rotary_dim == 96 and attention.rope is not None
    expected, magnitude = ROPE_INIT_FUNCTIONS["longrope"](AutoConfig.for_model(**raw), torch.device("cpu"), max_len)
    found, ours = inverse_frequencies(attention.rope, 96, max_len)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert ours == pytest.approx(magnitude)


def test_layers_of_each_head_size_have_their_table() -> None:
    config = parse_model_config({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 9})
    layers = tuple(
        replace(layer, mixer=replace(layer.attention, head_dim=dim))
        for layer, dim in zip(config.layers, (16, 32, 16), strict=True)
    )
    model = CausalLM(replace(config, layers=layers), Placement(torch.float32, torch.device("cpu")), 50)
    first, second, third = (layer.rotary.cos_sin for layer in model.attention_layers())
    assert first is third and first.shape == (50, 16) and second.shape == (50, 32)
    assert torch.equal(second, RotaryEmbedding(config.layers[0].attention.rope, 32, 50, torch.device("cpu")).cos_sin)
