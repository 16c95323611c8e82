"""What a model family is, and what most of them read of config.json in the same way.

Nothing here or in the families' files imports torch: what cannot be served is refused before that is waited for. A
family therefore says what its layers are (LayerSpec); what is computed for them stands in blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..layer_spec import AttentionSpec, FrameSpec, LayerSpec, MLPSpec, MoESpec
from ..model_file import ModelError
from ..raw_config import RawConfig
from ..rope_config import read_rope

MAX_LAYERS = 4096
MAX_EXPERTS = 4096  # of a layer
MAX_CHOSEN = 64  # by a token


@dataclass(frozen=True)
class Family:
    """Models whose config.json is read in one way, and whose layers it describes in one way."""

    architecture: str
    model_type: str  # for a config.json that names no architecture
    # Every key that is read of its config.json → what transformers' config class holds where it is left out.
    defaults: Mapping[str, Any]
    layers: Callable[[RawConfig], tuple[LayerSpec, ...]]  # raises ModelError for what cannot be run
    frame: Callable[[RawConfig], FrameSpec] = lambda raw: FrameSpec()
    norm_eps: str = "rms_norm_eps"  # its key
    # Of its checkpoints, where they differ from llama's: see ModelConfig.
    names: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    drafts: str = ""  # the key of how many layers its checkpoints have behind the last one, which draft tokens


def layer_count(raw: RawConfig) -> int:
    layers = raw.count("num_hidden_layers")
    if layers > MAX_LAYERS:  # before anything is made a layer
        raise ModelError(f"config.json: num_hidden_layers is {layers}, at most {MAX_LAYERS} are run: correct the file")
    return layers


def attention_spec(raw: RawConfig, *, bias: bool = False) -> AttentionSpec:
    """Of all layers, as far as they are alike. bias: of q, k, v and the output."""
    hidden, heads = raw.count("hidden_size"), raw.count("num_attention_heads")
    kv_heads = raw.optional_count("num_key_value_heads") or heads
    head_dim = raw.optional_count("head_dim") or hidden // heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}: correct "
            "the file"
        )
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}, rotary embedding needs an even one: correct the file")
    rope = read_rope(raw.values, raw.count("max_position_embeddings"), raw.default_theta)
    return AttentionSpec(heads, kv_heads, head_dim, rope, qkv_bias=bias, output_bias=bias)


def mlp_spec(raw: RawConfig, *, bias: bool = False) -> MLPSpec:
    activation = raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act is {activation!r}, supported is silu: use another model")
    return MLPSpec(raw.count("intermediate_size"), bias)


def expert_counts(raw: RawConfig, *keys: str) -> tuple[int, int]:
    """→ experts of a mixture, under the first of these keys that is set, and how many a token goes to."""
    key = next((key for key in keys if raw.values.get(key) is not None), keys[0])
    num_experts, top_k = raw.count(key), raw.count("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {top_k}, there are {num_experts} experts ({key}): correct the file"
        )
    if top_k > MAX_CHOSEN or num_experts > MAX_EXPERTS:
        raise ModelError(
            f"config.json: {num_experts} experts ({key}) of which a token goes to {top_k}: at most {MAX_EXPERTS} and "
            f"{MAX_CHOSEN} are run: use another model"
        )
    return num_experts, top_k


def dense_or_mixture(raw: RawConfig, mixture: MoESpec) -> tuple[MLPSpec | MoESpec, ...]:
    """Each layer's MLP, as mlp_only_layers (which are dense) and decoder_sparse_step (each how manieth is not) say."""
    dense, every = raw.get("mlp_only_layers") or (), raw.count("decoder_sparse_step")
    if not isinstance(dense, list | tuple) or not all(isinstance(index, int) for index in dense):
        raise ModelError(f"config.json: mlp_only_layers is {dense!r:.60}, a list of layers belongs there: correct it")
    plain = mlp_spec(raw)
    return tuple(plain if index in dense or (index + 1) % every else mixture for index in range(layer_count(raw)))
