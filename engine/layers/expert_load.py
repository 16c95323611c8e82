"""How many tokens each expert of a mixture got: counted by the routers, where the tokens are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WINDOW = 64  # tokens that an expert of a layer got on average: with fewer, chance alone makes one of them the busiest


class ExpertLoad:
    """Of all layers that have a router but the last one, which sees no more tokens than are sampled from.

    Whole numbers, added in whatever order: steps are as they were. What pads a step is not counted.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.num_experts = num_experts
        # Rows begin where Triton's variant for aligned pointers may be used.
        self._rows = torch.zeros(num_layers, num_experts + num_experts % 2, dtype=torch.int64, device=device)
        self.layers = list(self._rows[:, :num_experts])
        self.query_start: Tensor | None = None  # int32 [requests + 1], of the step whose tokens are routed

    @property
    def counts(self) -> Tensor:
        """int64 [layers, E], since the last `clear`."""
        return self._rows[:, : self.num_experts]

    def clear(self) -> None:
        self._rows.zero_()


class ExpertCounts(NamedTuple):
    tokens: tuple[int, ...] = ()  # of each expert, all layers together, since the start
    imbalance: float = 0.0  # tokens of a layer's busiest expert ÷ those of its average one, the mean over layers


class ExpertCounter:
    """Makes of counts what is told of them. The imbalance is that of the last window in which it says anything."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._imbalance = 0.0

    def take(self, counts: Tensor) -> ExpertCounts:
        """counts int64 [layers, E] on the host, none less than before."""
        lately = counts if self._before is None else counts - self._before
        total = lately.sum(dim=1)
        if int(total.min()) >= WINDOW * counts.shape[1]:
            self._imbalance = float((lately.amax(dim=1) * counts.shape[1] / total).mean())
            self._before = counts.clone()
        return ExpertCounts(tuple(counts.sum(dim=0).tolist()), self._imbalance)
