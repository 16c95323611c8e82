"""Attention sinks (arXiv 2309.17453), as gpt-oss has learned them: a logit a head, of a key that has no value."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..quant.format import FLOATS, Format, Stored
from ..quant.weights import Placement, frozen


class Sinks(nn.Module):
    """fp32, as scores are; in a checkpoint they stand below the attention, without a module of their own."""

    weight: nn.Parameter

    def __init__(self, num_heads: int, place: Placement) -> None:
        super().__init__()
        self.num_heads, self.place = num_heads, place
        self.span = place.span(num_heads)

    def choose(self, formats: Mapping[str, Format]) -> None:
        assert not formats, "no format stores vectors"

    def expected(self, part: str) -> dict[str, Stored]:
        return {"sinks": Stored((self.num_heads,), FLOATS)}

    def create(self) -> None:
        self.weight = frozen(torch.empty(self.span[1], dtype=torch.float32, device=self.place.device))

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.weight.copy_(tensors["sinks"].narrow(0, *self.span))

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(generator=generator)
