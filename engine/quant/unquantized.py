"""Products with weights in the activations' dtype, and which kernel multiplies, by the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.linear import cublaslt
from ...kernels.linear.cublaslt import Algorithms, measured_linear
from ...kernels.linear.fp8_rows import Fp8Rows
from ...kernels.linear.linear import ADDED_ROWS, prepare, small_linear, small_linear_rows
from ...kernels.linear.linear_hopper import (
    HopperTile,
    HopperTiles,
    Share,
    hopper_tiles,
    linear_hopper,
    silu_mul_linear_hopper,
)
from ...kernels.norm.activation import silu_mul
from .format import DUMMY_STD, FLOATS, Stored
from .weights import LinearShape, copy_weight, keep_at_hand

ADD_ROWS = 448  # from so many on, to add to the residual costs a product less than it saves in the norm behind it


class Products(NamedTuple):
    """With weights [N, K] of one size, without a bias. By number of rows: what is faster than cuBLAS's own choice."""

    algorithms: Algorithms = ()  # of cuBLAS
    tiles: HopperTiles = ()  # of linear_hopper
    gated_tiles: HopperTiles = ()  # the same for silu_mul

    @classmethod
    def of(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Products:
        """For a weight [rows, columns] on this GPU."""
        with torch.cuda.device(device):  # a thread that loads weights has the first one
            found = cls(
                cublaslt.algorithms(rows, columns, dtype),
                hopper_tiles(rows, columns, dtype, gated=False),
                hopper_tiles(rows, columns, dtype, gated=True),
            )
        if found.algorithms:
            cublaslt.prepare(device)
        return found

    def multiply(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ [M, N]; residual like it: is added to, and returned."""
        rows = x.shape[0]
        if (tile := _tile(self.tiles, rows)) is not None:
            return linear_hopper(x, weight, tile, residual)
        if rows < len(self.algorithms) and (algorithm := self.algorithms[rows]) is not None:
            return measured_linear(x, weight, algorithm, residual)
        return functional.linear(x, weight) if residual is None else residual.addmm_(x, weight.t())

    def silu_mul(self, x: Tensor, weight: Tensor, share: Share | None = None) -> Tensor | None:
        """silu(x Gᵀ) · (x Uᵀ) of weight cat(G, U) in one pass, with what adapters add; None where two are faster."""
        if (tile := _tile(self.gated_tiles, x.shape[0])) is not None:
            return silu_mul_linear_hopper(x, weight, tile, share)
        return None

    def joins(self, rows: int) -> bool:
        """Whether silu_mul of so many rows is one pass."""
        return _tile(self.gated_tiles, rows) is not None


def _tile(tiles: HopperTiles, rows: int) -> HopperTile | None:
    """The last one is for all rows beyond."""
    return tiles[min(rows, len(tiles) - 1)] if tiles else None


class Unquantized(nn.Module):
    """y = x Wᵀ + b."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    small_rows: int = 0  # up to how many rows go to small_linear; known when the weights are loaded
    products = Products()
    add_up_to: int = 0
    add_rows: int | None = None
    fp8_rows: int | None = None
    fp8_by_group = False

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape

    def expected(self, part: str) -> dict[str, Stored]:
        rows = self.shape.parts[part]
        found = {"weight": Stored((rows, self.shape.in_features), FLOATS)}
        return found | {"bias": Stored((rows,), FLOATS)} if self.shape.has_bias else found

    def create(self) -> None:
        shape = self.shape
        self.weight = shape.place.empty(shape.rows, shape.input_span[1])
        self.bias = shape.place.empty(shape.rows) if shape.has_bias else None

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        shape = self.shape
        weight = shape.ordered(part, tensors["weight"])
        share = weight.narrow(0, *shape.spans[part]).narrow(1, *shape.input_span)
        copy_weight(self.weight.narrow(0, shape.offsets[part], len(share)), share)
        if self.bias is not None:
            shape.load_bias(self.bias, part, tensors["bias"])

    def finish(self) -> None:
        weight = self.weight
        if weight.device.type == "cpu":
            # Stored column by column, a product with one row streams through the matrix: twice as fast with MKL.
            weight.data = weight.t().contiguous().t()
        elif weight.device.type == "cuda":
            self.small_rows = small_linear_rows(*weight.shape, weight.dtype)
            if self.small_rows:
                prepare(weight.device)
                self.add_up_to = ADDED_ROWS
            if self.bias is None:
                rows, columns = weight.shape
                self.products = Products.of(rows, columns, weight.dtype, weight.device)
                if self.shape.place.tp_size == 1 and weight.dtype != torch.float32:
                    self.add_rows = ADD_ROWS
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, DUMMY_STD, generator=generator)
        if self.bias is not None:
            self.bias.normal_(0.0, DUMMY_STD, generator=generator)

    def multiply(self, x: Tensor | Fp8Rows, residual: Tensor | None = None, late: bool = False) -> Tensor:
        assert isinstance(x, Tensor), "fp8_rows says that it never comes as FP8"
        rows, weight = x.shape[0], self.weight
        if rows <= (self.small_rows if residual is None else self.add_up_to):
            return small_linear(x, weight, self.bias, residual=residual, late=late)
        if self.bias is not None and residual is None:
            return functional.linear(x, weight, self.bias)
        return self.products.multiply(x, weight, residual)

    def silu_mul(self, x: Tensor | Fp8Rows, fp8_by_group: bool | None = None) -> Tensor:
        assert isinstance(x, Tensor), "fp8_rows says that it never comes as FP8"
        joined = self.products.silu_mul(x, self.weight)
        return silu_mul(self.multiply(x)) if joined is None else joined

    def silu_mul_adapted(self, x: Tensor, share: Callable[[Tensor], Share | None]) -> Tensor | None:
        if not self.products.joins(len(x)) or (found := share(x)) is None:
            return None
        return self.products.silu_mul(x, self.weight, found)

    def multiply_fp32(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and self.bias is None:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return self.multiply(x).float()


class Tied(Unquantized):
    """Multiplies by a weight that another module owns and loads (the output matrix tied to the embedding)."""

    def __init__(self, shape: LinearShape, owner: Callable[[], nn.Parameter]) -> None:
        """owner: → the weight [vocab, hidden], once it is there."""
        super().__init__(shape)
        self._owner = owner

    def expected(self, part: str) -> dict[str, Stored]:
        return {}

    def create(self) -> None:
        owned, (span,) = self._owner(), self.shape.spans.values()
        # A rank's part is no parameter of its own: it is the owner's memory.
        self.weight = owned if span[1] == owned.shape[0] else owned.data.narrow(0, *span)  # type: ignore[assignment]
        self.bias = None

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        pass  # its owner does

    def randomize(self, generator: torch.Generator) -> None:
        pass  # its owner does

    def finish(self) -> None:
        keep_at_hand(self)
