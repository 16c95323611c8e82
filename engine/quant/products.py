"""Products with numbers in 16 bit: which kernel multiplies, by the number of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.linear import cublaslt
from ...kernels.linear.cublaslt import Algorithms, measured_linear
from ...kernels.linear.linear_hopper import (
    HopperTile,
    HopperTiles,
    Share,
    hopper_tiles,
    linear_hopper,
    silu_mul_linear_hopper,
)


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
