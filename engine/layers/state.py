"""What layers that keep a recurrent state have in common: their memory, and weights that are no matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..families.layer_spec import StateSpec
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.weights import Placement, WeightMap, frozen


class StateLayer(nn.Module):
    """The part of a layer that keeps a state of each request, in slots that it is given."""

    def __init__(self, spec: StateSpec) -> None:
        super().__init__()
        self.spec = spec
        self.ring: Tensor | None = None
        self.matrices: Tensor | None = None

    def weight_map(self, prefix: str) -> WeightMap:
        """Of what it has itself, below the block's module."""
        raise NotImplementedError

    def bind(self, ring: Tensor | None, matrices: Tensor | None) -> None:
        """Use these slots, ring [N, R, C + G] and matrices [N, H, rows, columns]; None takes them away."""
        self.ring, self.matrices = ring, matrices


class Vectors(nn.Module):
    """Small tensors that stand below one module of the checkpoint, and that no format quantises."""

    weight: nn.Parameter  # those that it has, by the names there
    bias: nn.Parameter
    A_log: nn.Parameter
    D: nn.Parameter
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
