"""Gemma 1."""

from __future__ import annotations

from typing import Any

from . import llama
from .family import Family, attention_spec, layer_count, mlp_spec
from .layer_spec import Activation, FrameSpec, LayerSpec
from .raw_config import RawConfig

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
}
GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with GeGLU. What its files call "gelu" has always been computed with the tanh."""
    mlp = mlp_spec(raw, activations=GELU | {"gelu": "gelu_tanh"})
    return (LayerSpec(attention_spec(raw, bias=bool(raw.get("attention_bias"))), mlp),) * layer_count(raw)


def frame(raw: RawConfig) -> FrameSpec:
    """Weights of norms are stored less one; embeddings are multiplied by the root of their length."""
    return FrameSpec("rms_less_one", embedding_scale=raw.count("hidden_size") ** 0.5)


GEMMA = Family("GemmaForCausalLM", "gemma", DEFAULTS, layers, frame)
