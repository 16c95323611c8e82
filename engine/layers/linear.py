"""The only place that multiplies by weights: its method says how, its rule how it is divided over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.activation import gelu_tanh_mul, silu_mul
from ..layer_spec import Activation
from ..quant.format import Format, Stored
from ..quant.method import Dequantized, Quantized
from .unquantized import Unquantized
from .weights import LinearShape, Placement, ShardRule, keep_at_hand


class LinearMethod(Protocol):
    """How one Linear stores its weights and multiplies: an nn.Module with its tensors, tiles and tables.

    The first five are what WeightHolder has of these names.
    """

    add_rows: int | None  # from how many rows on a product takes the residual; None: never

    def expected(self, part: str) -> dict[str, Stored]: ...

    def create(self) -> None: ...

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None: ...

    def finish(self) -> None: ...

    def randomize(self, generator: torch.Generator) -> None: ...

    def multiply(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out] of this rank. residual [T, out], given from add_rows rows on: is added to."""
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out / 2]: silu(gate) · up of the layer's two parts."""
        ...

    def multiply_fp32(self, x: Tensor) -> Tensor:
        """The same as multiply with a result in fp32, not rounded to the activations' dtype where the device can."""
        ...


class Linear(nn.Module):
    """y = x Wᵀ + b for the shape that LinearShape describes."""

    method: LinearMethod

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        place: Placement,
        rule: ShardRule = "replicated",
        unit: int = 1,
        bias: bool = False,
        row_order: Mapping[str, Tensor] = {},
    ) -> None:
        super().__init__()
        self.shape = LinearShape(in_features, parts, place, rule, unit, bias, row_order)
        self.adapter: Callable[[Linear, Tensor, Tensor], Tensor] | None = None  # (layer, input, output) → output

    def choose(self, formats: Mapping[str, Format]) -> None:
        if not formats:
            self.method = Unquantized(self.shape)
        elif self.shape.place.device.type == "cpu":
            self.method = Quantized(self.shape, formats)
        else:  # there is no product with codes on a GPU yet
            self.method = Dequantized(self.shape, formats)
        keep_at_hand(self)

    def expected(self, part: str) -> dict[str, Stored]:
        return self.method.expected(part)

    def create(self) -> None:
        self.method.create()

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.method.load(part, tensors)

    def finish(self) -> None:
        self.method.finish()

    def randomize(self, generator: torch.Generator) -> None:
        self.method.randomize(generator)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out], in the activations' dtype; for the row rule this rank's summand."""
        y = self.method.multiply(x)
        return y if self.adapter is None else self.adapter(self, x, y)

    def add_to(self, residual: Tensor | None, x: Tensor) -> Tensor | None:
        """[T, in] → [T, out] that is to be added to residual [T, out]; None: it has been. Where residual is None, the
        result is wanted itself."""
        add_rows = self.method.add_rows
        if residual is None or add_rows is None or x.shape[0] < add_rows or self.adapter is not None:
            return self.forward(x)
        self.method.multiply(x, residual)
        return None

    def silu_mul(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out / 2] of this rank: silu of the first part, times the second."""
        return self.method.silu_mul(x) if self.adapter is None else silu_mul(self(x))

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """[T, in] → [T, out / 2] of this rank: the first half activated, times the second."""
        if activation == "silu":
            return self.silu_mul(x)
        assert activation == "gelu_tanh", f"there is no kernel for {activation} yet"
        return gelu_tanh_mul(self(x))
