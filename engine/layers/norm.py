"""Root-mean-square norm, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.norm import add_rms_norm, rms_norm
from .weights import Placement


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight, accumulated in fp32 (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = place.empty(size)

    def expected(self, part: str) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.size,)}

    def load(self, part: str, tensor: Tensor, kind: str = "weight") -> None:
        self.weight.copy_(tensor)

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, size] → (normed, residual): of x + residual, added in place into residual; None: of it."""
        if x is None:
            return rms_norm(residual, self.weight, self.eps), residual
        return add_rms_norm(x, residual, self.weight, self.eps)
