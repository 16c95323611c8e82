"""Acceptance that is imposed, for measuring what so many right drafts would bring: the answers mean nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.rows import RowTables
from .drafter import Drafter


def thresholds(acceptance: tuple[float, ...], device: torch.device) -> Tensor:
    """As impose_acceptance wants them."""
    return torch.tensor([round(rate * (1 << 32)) for rate in acceptance], dtype=torch.int64, device=device)


class Always:
    """A drafter whose drafts all count as proposed."""

    def __init__(self, drafter: Drafter, num_drafts: int) -> None:
        self.drafter, self.num_drafts = drafter, num_drafts

    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        self.drafter.propose(tables, rows, sample_index)
        sampled = sample_index >= 0
        found = self.num_drafts * sampled.int()
        tables.num_proposed.index_copy_(0, torch.where(sampled, rows, tables.dummy_row).long(), found)
        return found
