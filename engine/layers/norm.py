"""Root-mean-square norm, alone or fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.norm import add_rms_norm, rms_norm
from ..quant.format import FLOATS, Format, Stored
from .weights import Placement, keep_at_hand


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight, accumulated in fp32 (Zhang and Sennrich, arXiv:1910.07467)."""

    weight: nn.Parameter

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.size, self.eps, self.place = size, eps, place

    def choose(self, formats: Mapping[str, Format]) -> None:
        assert not formats, "no format stores vectors"

    def expected(self, part: str) -> dict[str, Stored]:
        return {"weight": Stored((self.size,), FLOATS)}

    def create(self) -> None:
        self.weight = self.place.empty(self.size)

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.weight.copy_(tensors["weight"])

    def finish(self) -> None:
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, size] → (normed, residual): of x + residual, added in place into residual; None: of it."""
        if x is None:
            return rms_norm(residual, self.weight, self.eps), residual
        return add_rms_norm(x, residual, self.weight, self.eps)
