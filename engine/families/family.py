"""What a model family is, and what most of them read of config.json in the same way.

Nothing here or in the families' files imports torch: what cannot be served is refused before that is waited for. A
family therefore says what its layers are (LayerSpec); what is computed for them stands in blocks.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .layer_spec import Activation, AttentionSpec, FrameSpec, LayerSpec, MLPSpec, MoESpec, Names
from .raw_config import RawConfig
from .rope_config import RopeConfig, read_rope, rotated_share
from .vision_spec import VisionSpec

MAX_LAYERS = 4096
MAX_EXPERTS = 4096  # of a layer
MAX_CHOSEN = 64  # by a token
SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}  # config.json's hidden_act → ours
_TABLE = Path(__file__).parents[2] / "configs" / "families.json"
# Config classes of transformers by model_type → their defaults of the keys that are read here. Made by
# tools/docs/family_defaults.py.
TRANSFORMERS: dict[str, dict[str, Any]] = json.loads(_TABLE.read_text())
# Keys that are read of every family and that not all of those classes have.
_LEFT_OUT = {
    "head_dim": None, "attention_bias": False, "mlp_bias": False, "num_experts": None, "num_local_experts": None,
    "tie_word_embeddings": False, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Models whose config.json is read in one way, and whose layers it describes in one way."""

    architecture: str
    model_type: str  # for a config.json that names no architecture
    layers: Callable[[RawConfig], tuple[LayerSpec, ...]]  # raises ModelError for what cannot be run
    frame: Callable[[RawConfig], FrameSpec] = lambda raw: FrameSpec()
    norm_eps: str = "rms_norm_eps"  # its key
    own: Mapping[str, Any] = field(default_factory=dict)  # defaults of keys that transformers' class does not have
    like: str = ""  # the model_type with transformers' class, where its own has none
    # Of its checkpoints, where they differ from llama's: see ModelConfig.
    names: Names = ()
    other_names: tuple[Names, ...] = ()
    ignored: tuple[str, ...] = ()
    drafts: str = ""  # the key of how many layers its checkpoints have behind the last one, which draft tokens
    nested: str = ""  # the key of the object in config.json that describes the decoder, which is beside pictures
    varied: bool = False  # that object names the family of text, which may be any
    foreign: bool = True  # whether transformers' code computes it, too, on this cache
    # What looks at pictures; None: of a model with pictures the text alone is served.
    vision: Callable[[RawConfig], VisionSpec | None] | None = None
    causal: bool = True  # whether its tokens see earlier ones alone, where config.json says nothing of it

    @property
    def defaults(self) -> dict[str, Any]:
        """Every key that is read of its config.json → the value where it is left out: that of transformers' class."""
        return {**_LEFT_OUT, **TRANSFORMERS[self.like or self.model_type], **self.own}


def layer_count(raw: RawConfig) -> int:
    layers = raw.count("num_hidden_layers")
    if layers > MAX_LAYERS:  # before anything is made a layer
        raise ModelError(f"config.json: num_hidden_layers is {layers}, at most {MAX_LAYERS} are run: correct the file")
    return layers


def attention_spec(
    raw: RawConfig, *, bias: bool = False, rope: RopeConfig | None = None, rotated: float | None = None
) -> AttentionSpec:
    """Of all layers, as far as they are alike.

    bias: of q, k, v and the output. rope: None: as config.json has it for all layers. rotated: the part of a head that
    is rotated where config.json does not say it; None: these models know no other than all.
    """
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
    share = rotated_share(raw.values, rotated or 1.0)
    if rotated is None and share != 1.0:
        raise ModelError(
            f"config.json: partial_rotary_factor is {share:g}, other than 1 is not supported for this architecture: "
            "use another model"
        )
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"config.json: partial_rotary_factor {share:g} of a head of {head_dim} is {rotary_dim}, an even number up "
            f"to {head_dim} is needed: correct the file"
        )
    rope = rope or read_rope(raw.values, raw.count("max_position_embeddings"), raw.default_theta)
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.type == "longrope" and len(factors) != rotary_dim // 2:
            raise ModelError(
                f"config.json: {name} has {len(factors)} entries, {rotary_dim // 2} pairs of elements are rotated: "
                "correct the file"
            )
    return AttentionSpec(
        heads, kv_heads, head_dim, rope, qkv_bias=bias, output_bias=bias,
        rotated=0 if rotary_dim == head_dim else rotary_dim,
    )  # fmt: skip


def window_of(raw: RawConfig) -> int:
    """sliding_window where use_sliding_window is on, else 0, which transformers writes then too."""
    window = raw.size("sliding_window")
    return window if raw.get("use_sliding_window") else 0


def windows_of(raw: RawConfig, full_every: int) -> tuple[int, ...]:
    """Of each layer, 0: none. Where layer_types does not say it, every full_every-th layer has none."""
    window = raw.optional_count("sliding_window") or 0
    return named_windows(raw, window) or tuple(
        0 if (index + 1) % full_every == 0 else window for index in range(layer_count(raw))
    )


def named_windows(raw: RawConfig, window: int, keys: str = "sliding_window") -> tuple[int, ...] | None:
    """Of each layer that layer_types names, 0: none; None: it is left out. keys: what makes `window` more than 0."""
    layer_types, num_layers = raw.optional_list("layer_types"), layer_count(raw)
    if layer_types is None:
        return None
    if len(layer_types) != num_layers:
        raise ModelError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers: correct the file"
        )
    for name in layer_types:
        if name not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer type {name!r} is not supported (full_attention, sliding_attention are): "
                "use another model"
            )
    if "sliding_attention" in layer_types and not window:
        raise ModelError(f"config.json: layer_types has sliding_attention but no window is on: set {keys}")
    return tuple(window if name == "sliding_attention" else 0 for name in layer_types)


def mlp_spec(
    raw: RawConfig, key: str = "hidden_act", *, bias: bool = False, activations: Mapping[str, Activation] = SILU
) -> MLPSpec:
    """bias: of all products. activations: those that are run here, by their names in config.json."""
    return MLPSpec(raw.count("intermediate_size"), bias, activation_of(raw, key, activations))


def activation_of(raw: RawConfig, key: str, activations: Mapping[str, Activation] = SILU) -> Activation:
    """Raises ModelError for another one than these."""
    name = raw.get(key) or "silu"
    if name not in activations:
        known = [known for known in activations if known != "swish"]
        verb = "is" if len(known) == 1 else "are"
        raise ModelError(f"config.json: {key} is {name!r}, supported {verb} {', '.join(known)}: use another model")
    return activations[name]


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
    dense, every = raw.optional_list("mlp_only_layers") or (), raw.count("decoder_sparse_step")
    plain, count = mlp_spec(raw), layer_count(raw)
    if any(type(index) is not int or not 0 <= index < count for index in dense):
        raise ModelError(
            f"config.json: mlp_only_layers is {dense!r:.60}, a list of layers from 0 to {count - 1} belongs there: "
            "correct the file"
        )
    return tuple(plain if index in dense or (index + 1) % every else mixture for index in range(count))
