"""Who drafts: writes tokens behind those that there are, on the device, for the next step to verify."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...kernels.sampling.ngram import propose_ngrams
from ..cache.rows import RowTables
from ..options.speculation import Speculation


class Drafter(Protocol):
    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        """After the step's tokens have been appended. For the rows that sampled (sample_index ≥ 0), both int32 [B]:
        drafts into the history's rings, behind the last token, any valid ids where there is none; how many are meant
        goes to num_proposed, and, 0 for the others, into the result, int32 [B]."""
        ...


class NgramDrafter:
    """What came when the last few tokens stood there before."""

    def __init__(self, settings: Speculation) -> None:
        self.settings = settings

    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        found = rows.new_empty(len(rows))
        settings = self.settings
        propose_ngrams(
            tables.history, tables.num_computed, rows, sample_index, tables.num_proposed, found,
            settings.min_ngram, settings.max_ngram, settings.num_drafts,
        )  # fmt: skip
        return found
