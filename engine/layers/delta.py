"""A gated delta net over its state: where the kernels meet the step's batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.state.delta_net import delta_net
from ...kernels.state.delta_parts import CHUNK
from ...kernels.state.gated_norm import gated_rms_norm
from ...kernels.state.step import StateStep
from ..families.layer_spec import DeltaSpec
from ..quant.weights import Placement, WeightMap
from .norm import Norm, make_norm
from .state import StateLayer, Vectors


class DeltaNet(StateLayer):
    """One layer: a short convolution of queries, keys and values, the gated delta rule, a norm of each head times the
    output gate. Of this rank's heads."""

    norm: Norm

    def __init__(self, spec: DeltaSpec, eps: float, place: Placement) -> None:
        share = spec.share(place.tp_size)
        super().__init__(share.state)
        self.delta = share
        channels = of_heads = None  # what this rank has of them; None: all
        if place.tp_size > 1:
            sizes = (spec.key_size, spec.value_size, spec.num_value_heads)
            keys, values, of_heads = (_mine(place, size) for size in sizes)
            channels = torch.cat((keys, spec.key_size + keys, 2 * spec.key_size + values))
        self.conv = Vectors({"weight": (spec.channels, 1, spec.conv_width)}, place.dtype, place, channels)
        heads = (spec.num_value_heads,)
        self.decay = Vectors({"A_log": heads, "dt_bias": heads}, torch.float32, place, of_heads)
        self.norm = make_norm("rms", (spec.value_dim,), eps, place)

    def weight_map(self, prefix: str) -> WeightMap:
        return {f"{prefix}.conv1d": (self.conv, ""), prefix: (self.decay, ""), f"{prefix}.norm": (self.norm, "")}

    def forward(self, mixed: Tensor, gates: Tensor, z: Tensor, step: StateStep | None) -> Tensor:
        """mixed [T, C], gates [T, 2·H] (b, then a), z [T, H·V] → [T, H·V]. The step's tokens go into ring and state.

        Without slots (the memory profiling run) nothing is kept: zeros of the right shape.
        """
        ring, matrices, spec = self.ring, self.matrices, self.delta
        if ring is None or matrices is None:
            # What the kernels of prompts have beside their result (delta_prompts), so that the profile counts it.
            beside = z.new_empty(len(z), 2 * spec.key_size + spec.num_value_heads * (spec.key_dim + CHUNK + 2))
            found = z.new_zeros(z.shape)
            del beside
            return found
        assert step is not None
        weight = self.conv.weight.view(len(self.conv.weight), -1)
        out = delta_net(
            mixed, gates, weight, self.decay.A_log, self.decay.dt_bias, ring, matrices, step, spec.num_key_heads
        )
        return gated_rms_norm(out, z, self.norm.weight, self.norm.eps, spec.gate)


def _mine(place: Placement, length: int) -> Tensor:
    """This rank's of so many rows, int64."""
    start, share = place.span(length)
    return torch.arange(start, start + share)
