"""A short convolution between its products: one makes both gates and what is gated, one the output."""

from __future__ import annotations

from torch import Tensor

from ..describe.model_config import ModelConfig
from ..families.layer_spec import ConvSpec
from ..layers.attention import AttentionBatch
from ..layers.gated_conv import GatedConv
from ..layers.linear import Linear
from ..quant.weights import Placement, keep_at_hand
from .state_block import StateBlock


class ConvBlock(StateBlock):
    """One projection of B, C and x; the convolution; output projection."""

    name = "conv"  # in the checkpoint

    def __init__(self, spec: ConvSpec, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        hidden, channels = config.hidden_size, spec.channels
        self.input = Linear(hidden, {"in": 3 * channels}, place=place, bias=spec.bias)
        self.state = GatedConv(spec, place)
        self.output = Linear(channels, {"out": hidden}, place=place, rule="row", bias=spec.bias)
        keep_at_hand(self)

    def mix(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        return self.state(self.input(x), batch.state)
