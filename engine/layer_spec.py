"""What one layer of a model is: numbers that a family reads of config.json, and all that blocks are built from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of a token: `num_kv_heads` keys of `head_dim` and values of `value_dim` elements."""

    kind: str  # "full"; a layer with a sliding window keeps all keys too and masks them
    num_kv_heads: int
    head_dim: int
    value_dim: int
    group: int = 0  # index of the KV group: layers of a group share block tables


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention, `num_heads` queries over `num_kv_heads` keys and values, all of `head_dim`, rotated whole."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0  # a query sees the last `window` keys, its own included; 0 = all
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # an RMS norm over every query and key head, before the rotation


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP: down(silu(gate(x)) · up(x)) with `inner` gates."""

    inner: int
    bias: bool = False  # of all three


@dataclass(frozen=True)
class LayerSpec:
    """Of one decoder layer. Another kind of attention or of MLP is another type in its place."""

    attention: AttentionSpec
    mlp: MLPSpec
