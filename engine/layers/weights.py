"""Where weights live, how tensor parallelism divides them, and what the loader asks of a module that holds some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Placement:
    """Dtype and device of a model's weights, and this rank's place among those that share the model."""

    dtype: torch.dtype
    device: torch.device
    tp_rank: int = 0
    tp_size: int = 1

    def span(self, length: int, unit: int = 1) -> tuple[int, int]:
        """(start, length) of this rank's share of `length` rows or columns, cut between units (a unit = one head).

        Where there are fewer units than ranks, neighbouring ranks hold the same one (key and value heads).
        Raises ValueError when the units do not divide evenly.
        """
        units = length // unit
        if units % self.tp_size == 0:
            share = length // self.tp_size
            return self.tp_rank * share, share
        if self.tp_size % units == 0:
            return self.tp_rank * units // self.tp_size * unit, unit
        raise ValueError(f"{units} parts cannot be divided over {self.tp_size} ranks: choose a divisor of {units}")

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised, frozen weight."""
        return torch.nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


class WeightHolder(Protocol):
    """A module that takes tensors from a checkpoint. `part` names one of several matrices fused into one (q, k, v)."""

    def expected(self, part: str) -> dict[str, tuple[int, ...]]:
        """Suffix in the checkpoint ("weight", "bias", …) → whole shape, before any division over ranks."""
        ...

    def load(self, part: str, tensor: torch.Tensor, kind: str = "weight") -> None:
        """Copy this rank's share of `tensor` (any device and float dtype, whole) into place."""
        ...

    def finish(self) -> None:
        """Called once when everything is loaded: the layout may change, kernels are chosen, workspaces made."""
        ...

    def randomize(self, generator: torch.Generator) -> None:
        """Fill with dummy weights."""
        ...
