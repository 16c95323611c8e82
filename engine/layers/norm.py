"""Norms, alone or fused with the residual addition before them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.layer_norm import add_layer_norm, layer_norm
from ...kernels.norm import add_rms_norm, rms_norm
from ..layer_spec import NormKind
from ..quant.format import FLOATS, Format, Stored
from .weights import Placement, frozen, keep_at_hand


class Norm(nn.Module):
    """Over the last dimension of `shape`, whose weights stand in the checkpoint as "weight".

    `order` int64: of the last dimension's elements, where the model has another one than the checkpoint.
    `scale`: what is added to the residual before is multiplied by it.
    """

    weight: nn.Parameter

    def __init__(
        self, shape: tuple[int, ...], eps: float, place: Placement, order: Tensor | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.place, self.order, self.scale = shape, eps, place, order, scale

    def choose(self, formats: Mapping[str, Format]) -> None:
        assert not formats, "no format stores vectors"

    def expected(self, part: str) -> dict[str, Stored]:
        return {"weight": Stored(self.shape, FLOATS)}

    def create(self) -> None:
        self.weight = self.place.empty(*self.shape)

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.weight.copy_(self._ordered(tensors["weight"]))

    def finish(self) -> None:
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, size] → (normed, residual): of scale · x + residual, added in place into residual; None:
        of it."""
        raise NotImplementedError

    def in_place(self, x: Tensor) -> None:
        """x [T, *shape], any strides but 1 in the last dimension."""
        raise NotImplementedError

    def _ordered(self, weight: Tensor) -> Tensor:
        return weight if self.order is None else weight.index_select(-1, self.order.to(weight.device))


class RMSNorm(Norm):
    """y = x / sqrt(mean(x²) + eps) · weight, accumulated in fp32 (Zhang and Sennrich, arXiv:1910.07467).

    less_one: the checkpoint has the weights less one. They are kept in fp32, for bf16 is coarser near one than where
    they are stored.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        place: Placement,
        order: Tensor | None = None,
        scale: float = 1.0,
        less_one: bool = False,
    ) -> None:
        super().__init__((size,), eps, place, order, scale)
        self.less_one = less_one

    def create(self) -> None:
        super().create()
        if self.less_one:
            self.weight = frozen(self.weight.float())

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        super().load(part, tensors)
        if self.less_one:
            self.weight.add_(1)

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        if x is None:
            return rms_norm(residual, self.weight, self.eps), residual
        return add_rms_norm(x, residual, self.weight, self.eps, self.scale)

    def in_place(self, x: Tensor) -> None:
        rms_norm(x, self.weight, self.eps, out=x)


class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, in fp32 (Ba, Kiros and Hinton, arXiv:1607.06450).

    shape (size,), or (heads, size) where each head has weights of its own.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        eps: float,
        place: Placement,
        order: Tensor | None = None,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__(shape, eps, place, order, scale)
        self.has_bias = bias

    def expected(self, part: str) -> dict[str, Stored]:
        found = super().expected(part)
        return found | {"bias": Stored(self.shape, FLOATS)} if self.has_bias else found

    def create(self) -> None:
        super().create()
        self.bias = self.place.empty(*self.shape) if self.has_bias else None

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        super().load(part, tensors)
        if self.bias is not None:
            self.bias.copy_(self._ordered(tensors["bias"]))

    def randomize(self, generator: torch.Generator) -> None:
        super().randomize(generator)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        if x is None:
            return layer_norm(residual, self.weight, self.bias, self.eps), residual
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.scale)

    def in_place(self, x: Tensor) -> None:
        layer_norm(x, self.weight, self.bias, self.eps, out=x)


class NoNorm(nn.Module):
    """The residual addition alone, where a norm would be."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As Norm has it; what is normed elsewhere is the residual itself here, and must not be written to."""
        if x is not None:
            residual.add_(x, alpha=self.scale)
        return residual, residual


def make_norm(
    kind: NormKind,
    shape: tuple[int, ...],
    eps: float,
    place: Placement,
    order: Tensor | None = None,
    scale: float = 1.0,
) -> Norm:
    if kind in ("layer", "layer_bias"):
        return LayerNorm(shape, eps, place, order, scale, bias=kind == "layer_bias")
    (size,) = shape
    return RMSNorm(size, eps, place, order, scale, less_one=kind == "rms_less_one")
