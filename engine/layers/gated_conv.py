"""A short convolution between two gates, over what it keeps of each request."""

from __future__ import annotations

from torch import Tensor

from ...kernels.state.gated_conv import gated_conv
from ...kernels.state.step import StateStep
from ..families.layer_spec import ConvSpec
from ..quant.weights import Placement, WeightMap
from .state import StateLayer, Vectors


class GatedConv(StateLayer):
    """C · conv(B · x) of products B, C and x."""

    def __init__(self, spec: ConvSpec, place: Placement) -> None:
        super().__init__(spec.state)
        bias = {"bias": (spec.channels,)} if spec.bias else {}
        self.conv = Vectors({"weight": (spec.channels, 1, spec.conv_width), **bias}, place.dtype, place)
        self.bias = spec.bias

    def weight_map(self, prefix: str) -> WeightMap:
        return {f"{prefix}.conv": (self.conv, "")}

    def forward(self, products: Tensor, step: StateStep | None) -> Tensor:
        """products [T, 3 · channels] → [T, channels]; the step's tokens go into the ring. Without slots (the memory
        profiling run) nothing is kept: zeros of the right shape."""
        channels = self.spec.channels
        if self.ring is None:
            both = products.new_zeros(2, len(products), channels)  # and the inputs that prompts have beside it
            return both[0]
        assert step is not None
        weight = self.conv.weight.view(channels, -1)
        return gated_conv(products, weight, self.conv.bias if self.bias else None, self.ring, step)
