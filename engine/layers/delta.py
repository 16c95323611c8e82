"""A gated delta net over its state: where the kernels meet the step's batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.state.delta_net import delta_net
from ...kernels.state.delta_parts import CHUNK
from ...kernels.state.gated_norm import gated_rms_norm
from ...kernels.state.step import StateStep
from ..families.layer_spec import DeltaSpec
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.weights import Placement, WeightMap, frozen
from .norm import Norm, make_norm


class Vectors(nn.Module):
    """Small tensors that stand below one module of the checkpoint, and that no format quantises."""

    weight: nn.Parameter  # those that it has, by the names there
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, place: Placement, rows: Tensor | None = None
    ) -> None:
        """rows int64: of each of them that this rank has; None: all."""
        super().__init__()
        self.shapes, self.dtype, self.place, self.rows = dict(shapes), dtype, place, rows

    def choose(self, formats: Mapping[str, Format]) -> None:
        assert not formats, "no format stores vectors"

    def expected(self, part: str) -> dict[str, Stored]:
        return {name: Stored(shape, FLOATS) for name, shape in self.shapes.items()}

    def create(self) -> None:
        for name, shape in self.shapes.items():
            shape = shape if self.rows is None else (len(self.rows), *shape[1:])
            setattr(self, name, frozen(torch.empty(shape, dtype=self.dtype, device=self.place.device)))

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.get_parameter(name).copy_(tensor if self.rows is None else tensor[self.rows.to(tensor.device)])

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        for name in self.shapes:
            self.get_parameter(name).normal_(0.0, DUMMY_STD, generator=generator)


class DeltaNet(nn.Module):
    """One layer: a short convolution of queries, keys and values, the gated delta rule, a norm of each head times the
    output gate. Of this rank's heads."""

    norm: Norm

    def __init__(self, spec: DeltaSpec, eps: float, place: Placement) -> None:
        super().__init__()
        self.delta = spec.share(place.tp_size)
        self.spec = self.delta.state
        channels = of_heads = None  # what this rank has of them; None: all
        if place.tp_size > 1:
            sizes = (spec.key_size, spec.value_size, spec.num_value_heads)
            keys, values, of_heads = (_mine(place, size) for size in sizes)
            channels = torch.cat((keys, spec.key_size + keys, 2 * spec.key_size + values))
        self.conv = Vectors({"weight": (spec.channels, 1, spec.conv_width)}, place.dtype, place, channels)
        heads = (spec.num_value_heads,)
        self.decay = Vectors({"A_log": heads, "dt_bias": heads}, torch.float32, place, of_heads)
        self.norm = make_norm("rms", (spec.value_dim,), eps, place)
        self.ring: Tensor | None = None
        self.matrices: Tensor | None = None

    def weight_map(self, prefix: str) -> WeightMap:
        return {f"{prefix}.conv1d": (self.conv, ""), prefix: (self.decay, ""), f"{prefix}.norm": (self.norm, "")}

    def bind(self, ring: Tensor | None, matrices: Tensor | None) -> None:
        """Use these slots, ring [N, R, C + G] and matrices [N, H, rows, columns]; None takes them away."""
        self.ring, self.matrices = ring, matrices

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
