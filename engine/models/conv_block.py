"""A short convolution between its products: one makes both gates and what is gated, one the output."""

from __future__ import annotations

from torch import Tensor, nn

from ..describe.model_config import ModelConfig
from ..families.layer_spec import ConvSpec
from ..layers.attention import AttentionBatch
from ..layers.gated_conv import GatedConv
from ..layers.linear import Linear
from ..quant.weights import Placement, WeightMap, keep_at_hand


class ConvBlock(nn.Module):
    """One projection of B, C and x; the convolution; output projection."""

    name = "conv"  # in the checkpoint

    def __init__(self, spec: ConvSpec, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        hidden, channels = config.hidden_size, spec.channels
        self.input = Linear(hidden, {"in": 3 * channels}, place=place, bias=spec.bias)
        self.state = GatedConv(spec, place)
        self.output = Linear(channels, {"out": hidden}, place=place, rule="row", bias=spec.bias)
        keep_at_hand(self)

    def weight_map(self, prefix: str) -> WeightMap:
        return {
            f"{prefix}.in_proj": (self.input, "in"),
            **self.state.weight_map(prefix),
            f"{prefix}.out_proj": (self.output, "out"),
        }

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, batch: AttentionBatch, wanted: Tensor | None
    ) -> Tensor | None:
        """→ what is to be added to residual; None: it has been. Where residual is None, the result is wanted itself."""
        out = self.state(self.input(x), batch.state)
        if wanted is not None:
            return self.output(out.index_select(0, wanted))
        return self.output.add_to(residual, out)
