"""Norms, alone or fused with the residual addition before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...kernels.linear.fp8_rows import Fp8Rows, add_rms_norm_fp8, rms_norm_fp8
from ...kernels.norm.layer_norm import add_layer_norm, layer_norm
from ...kernels.norm.norm import Unnormed, rms_norm
from ..families.layer_spec import NormKind
from ..parallel.group import ALONE, Group
from ..quant.format import FLOATS, Format, Stored
from ..quant.weights import Placement, frozen, keep_at_hand


class Reader(Protocol):
    """The only module that reads what a norm makes, or the first, which passes it on: see Linear and Router."""

    def norms(self, rows: int) -> bool: ...

    def fp8_input(self, rows: int) -> bool | None: ...


Normed = Tensor | Fp8Rows | Unnormed


class Norm(nn.Module):
    """Over the last dimension of `shape`, whose weights stand in the checkpoint as "weight".

    `order` int64: of the last dimension's elements, where the model has another one than the checkpoint.
    `scale`: what is added to the residual before is multiplied by it. `group`: ranks that each bring a summand of it.
    `span`: (first, number) of the first dimension's weights that this rank has, where it is divided.
    """

    weight: nn.Parameter

    def __init__(
        self,
        shape: tuple[int, ...],
        eps: float,
        place: Placement,
        order: Tensor | None = None,
        scale: float = 1.0,
        group: Group = ALONE,
        span: tuple[int, int] | None = None,
        less_one: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.place, self.order, self.scale, self.group = shape, eps, place, order, scale, group
        self.less_one, self.has_bias = less_one, bias
        self.span = (0, shape[0]) if span is None else span

    def choose(self, formats: Mapping[str, Format]) -> None:
        assert not formats, "no format stores vectors"

    def expected(self, part: str) -> dict[str, Stored]:
        return {"weight": Stored(self.shape, FLOATS)}

    def create(self) -> None:
        self.weight = self.place.empty(self.span[1], *self.shape[1:])

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.weight.copy_(self._mine(tensors["weight"]))

    def finish(self) -> None:
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)

    def forward(self, x: Tensor | None, residual: Tensor, reader: Reader | None = None) -> tuple[Normed, Tensor]:
        """x and residual [T, size] → (normed, residual): of scale · x + residual, added in place into residual; None:
        of it. x is the sum of the group's. reader: gets `normed` as it takes it best; None: as a Tensor.
        """
        raise NotImplementedError

    def in_place(self, x: Tensor) -> None:
        """x [T, *shape], any strides but 1 in the last dimension."""
        raise NotImplementedError

    def _mine(self, weight: Tensor) -> Tensor:
        weight = weight.narrow(0, *self.span)
        return weight if self.order is None else weight.index_select(-1, self.order.to(weight.device))


class RMSNorm(Norm):
    """y = x / sqrt(mean(x²) + eps) · weight, accumulated in fp32 (Zhang and Sennrich, arXiv:1910.07467).

    shape (size,). less_one: the checkpoint has the weights less one. They are kept in fp32, for bf16 is coarser near
    one than where they are stored.
    """

    def create(self) -> None:
        super().create()
        if self.less_one:
            self.weight = frozen(self.weight.float())

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        super().load(part, tensors)
        if self.less_one:
            self.weight.add_(1)

    def forward(self, x: Tensor | None, residual: Tensor, reader: Reader | None = None) -> tuple[Normed, Tensor]:
        if x is None and reader is not None and reader.norms(len(residual)):
            return Unnormed(residual, self.weight, self.eps), residual
        fp8_by_group = None if reader is None else reader.fp8_input(len(residual))
        if fp8_by_group is not None:
            if x is None:
                return rms_norm_fp8(residual, self.weight, self.eps, fp8_by_group), residual
            x = self.group.all_reduce(x)
            return add_rms_norm_fp8(x, residual, self.weight, self.eps, self.scale, fp8_by_group), residual
        if x is None:
            return rms_norm(residual, self.weight, self.eps), residual
        return self.group.add_rms_norm(x, residual, self.weight, self.eps, self.scale)

    def in_place(self, x: Tensor) -> None:
        rms_norm(x, self.weight, self.eps, out=x)


class UnitNorm(RMSNorm):
    """An RMS norm whose weights are 1, which no checkpoint has."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__((size,), eps, place)
        self.weight = frozen(torch.ones(size, dtype=place.dtype, device=place.device))

    def of(self, heads: Tensor) -> Tensor:
        """heads [T, H, size] → the same normed, in memory of its own."""
        return rms_norm(heads, self.weight, self.eps)


class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, in fp32 (Ba, Kiros and Hinton, arXiv:1607.06450).

    shape (size,), or (heads, size) where each head has weights of its own.
    """

    def expected(self, part: str) -> dict[str, Stored]:
        found = super().expected(part)
        return found | {"bias": Stored(self.shape, FLOATS)} if self.has_bias else found

    def create(self) -> None:
        super().create()
        self.bias = self.place.empty(*self.weight.shape) if self.has_bias else None

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        super().load(part, tensors)
        if self.bias is not None:
            self.bias.copy_(self._mine(tensors["bias"]))

    def randomize(self, generator: torch.Generator) -> None:
        super().randomize(generator)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor | None, residual: Tensor, reader: Reader | None = None) -> tuple[Normed, Tensor]:
        if x is None:
            return layer_norm(residual, self.weight, self.bias, self.eps), residual
        return add_layer_norm(self.group.all_reduce(x), residual, self.weight, self.bias, self.eps, self.scale)

    def in_place(self, x: Tensor) -> None:
        layer_norm(x, self.weight, self.bias, self.eps, out=x)


class NoNorm(nn.Module):
    """The residual addition alone, where a norm would be."""

    def __init__(self, scale: float = 1.0, group: Group = ALONE) -> None:
        super().__init__()
        self.scale, self.group = scale, group

    def forward(self, x: Tensor | None, residual: Tensor, reader: Reader | None = None) -> tuple[Normed, Tensor]:
        """As Norm has it; what is normed elsewhere is the residual itself here, and must not be written to."""
        if x is not None:
            residual.add_(self.group.all_reduce(x), alpha=self.scale)
        return residual, residual


def make_norm(kind: NormKind, shape: tuple[int, ...], eps: float, place: Placement, **settings: Any) -> Norm:
    """settings: Norm's."""
    if kind in ("layer", "layer_bias"):
        return LayerNorm(shape, eps, place, bias=kind == "layer_bias", **settings)
    return RMSNorm(shape, eps, place, less_one=kind == "rms_less_one", **settings)


def norm_divided(pairs: Sequence[tuple[Norm, Tensor]], group: Group) -> None:
    """RMS norms, in place, of vectors that are divided over ranks, in one exchange: x [T, of this rank].

    Ranks have as many elements each, and where several have the same ones, all are had by as many: so the mean of the
    ranks' means is the whole vector's.
    """
    means = torch.stack([x.float().square().mean(dim=1) for _, x in pairs])
    means = group.all_reduce(means).div_(group.size)
    for (norm, x), mean in zip(pairs, means, strict=True):
        x.copy_(x.float() * torch.rsqrt(mean + norm.eps)[:, None] * norm.weight)
