"""What an encoder is: numbers that a family reads of config.json, and all that its model is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .rope_config import RopeConfig

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
# Our name of a module → its path in the checkpoint, behind the prefix; those of layers stand behind the layer's.
Paths = Mapping[str, str]


@dataclass(frozen=True)
class EncoderLayerSpec:
    """What differs between layers."""

    rope: RopeConfig | None = None  # how positions are rotated; None: not at all
    window: int = 0  # a token sees those less than `window` away, on both sides; 0: all


@dataclass(frozen=True)
class EncoderSpec:
    """A stack of attention (every token sees every other one) and MLP, each with a LayerNorm."""

    prefix: str  # of names in the checkpoint, which those of a bare body lack
    paths: Paths
    num_heads: int
    head_dim: int
    inner: int  # of the MLP
    layers: tuple[EncoderLayerSpec, ...]
    activation: Activation
    gated: bool = False  # down(act(gate(x)) · up(x)), without: down(act(up(x)))
    norm_first: bool = False  # before attention and MLP, on a stream that is not normed; without: of each sum
    positions: int = 0  # rows of the table of learned positions; 0: none
    first_position: int = 0  # the row of a text's first token
    token_types: int = 0  # rows of the table that tells the first text of a pair from the second
    norm_bias: bool = True
    qkv_bias: bool = True
    output_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
