"""Mamba-2 between its products, alone and beside attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..describe.model_config import ModelConfig
from ..families.layer_spec import PairSpec, ScanSpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.linear import Linear
from ..layers.rope import RotaryEmbedding
from ..layers.scan import Scan
from ..layers.state import StateLayer
from ..quant.weights import Placement, WeightMap, keep_at_hand
from .attention_block import AttentionBlock
from .state_block import StateBlock


class ScanBlock(StateBlock):
    """One projection of output gates, values, what is written, what is read, and time steps; Mamba-2; output
    projection."""

    name = "mamba"  # in the checkpoint

    def __init__(self, spec: ScanSpec, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.sizes = [spec.inner, spec.channels, spec.num_heads]
        self.input = Linear(hidden, {"in": sum(self.sizes)}, place=place, bias=spec.input_bias)
        self.multipliers: Tensor | None = None
        if spec.multipliers:
            parts = (spec.inner, spec.inner, spec.group_size, spec.group_size, spec.num_heads)
            factors = [torch.full((size,), by) for size, by in zip(parts, spec.multipliers, strict=True)]
            self.multipliers = torch.cat(factors).to(place.device, place.dtype)
        self.state = Scan(spec, config.norm_eps, place)
        self.output = Linear(spec.inner, {"out": hidden}, place=place, rule="row", bias=spec.output_bias)
        keep_at_hand(self)

    def mix(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        products = self.input(x)
        if self.multipliers is not None:
            products *= self.multipliers
        z, mixed, dt = products.split(self.sizes, dim=1)
        return self.state(mixed, dt, z, batch.state)


class PairBlock(nn.Module):
    """Attention and Mamba-2 of the same input; their results, each times a number, are added up."""

    name = "self_attn"  # in the checkpoint, that of attention

    def __init__(
        self, spec: PairSpec, config: ModelConfig, layer: int, rotary: RotaryEmbedding, place: Placement
    ) -> None:
        super().__init__()
        self.attending = AttentionBlock(spec.attention, config, layer, rotary, place)
        self.scanning = ScanBlock(spec.scan, config, place)
        self.scales = spec.scales
        keep_at_hand(self)

    @property
    def attention(self) -> Attention:
        return self.attending.attention

    @property
    def state(self) -> StateLayer:
        return self.scanning.state

    def weight_map(self, prefix: str) -> WeightMap:
        layer = prefix.rpartition(".")[0]
        return self.attending.weight_map(prefix) | self.scanning.weight_map(f"{layer}.{self.scanning.name}")

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, batch: AttentionBatch, wanted: Tensor | None
    ) -> Tensor:
        """→ what is to be added to residual."""
        of_attention, of_scan = self.scales
        found = self.scanning(x, None, positions, batch, wanted)
        attended = self.attending(x, None, positions, batch, wanted)
        if of_scan != 1.0:
            found *= of_scan
        return found.add_(attended, alpha=of_attention)
