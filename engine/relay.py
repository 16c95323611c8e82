"""What a stage of a pipeline has beside its layers: hidden states that come and go, and tokens that come later.

The last stage samples, and the first one computes the next steps meanwhile. What it does not need to know yet it does
not wait for: a step's tokens are taken from the ring only when a plan touches one of their rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import SampleBatch
from .parallel.pipeline import Stage
from .plan import StepPlan
from .rows import RowTables


@dataclass
class Awaited:
    """The tokens of a step, which the last stage has still to sample, or has sampled already."""

    rows: frozenset[int]
    places: Tensor  # int64 [S], in the rows' rings, flat


class Relay:
    def __init__(self, stage: Stage, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        assert stage.ring is not None
        self.stage, self.ring = stage, stage.ring
        self._stream = torch.empty(0, hidden_size, dtype=dtype, device=device)  # the residual stream
        self._awaited: deque[Awaited] = deque()

    # ---- hidden states ----

    def reserve(self, num_tokens: int) -> None:
        """Graphs keep the address: before they are captured, for the largest of them."""
        if num_tokens > len(self._stream):
            self._stream = self._stream.new_empty(num_tokens, self._stream.shape[1])

    def residual(self, num_tokens: int) -> Tensor:
        """[T, hidden]: what comes in, is computed on in place, and goes out."""
        return self._stream[:num_tokens]

    def take_in(self, num_tokens: int) -> None:
        self.reserve(num_tokens)
        if not self.stage.is_first:
            self.ring.receive(self.residual(num_tokens))

    def hand_over(self, num_tokens: int) -> None:
        self.ring.send(self.residual(num_tokens).clone())  # the next step may be faster than the ring

    # ---- tokens ----

    def expect(self, samples: SampleBatch, tables: RowTables) -> None:
        """On the first stage, when a step is over: its tokens will come."""
        if not samples.plan.num_samples:
            return
        ring, nowhere = tables.history.ring, tables.history.recent.numel() - 1  # of the dummy row
        places = samples.rows.long() * ring + samples.seq_lens % ring
        places = torch.where(samples.seq_lens < tables.history.max_len, places, nowhere)
        self._awaited.append(Awaited(frozenset(samples.rows_cpu.tolist()), places))

    def settle(self, plan: StepPlan, tables: RowTables) -> None:
        """Before a plan runs: its rows know their tokens, and who had them before needs them no more."""
        touched = {*plan.rows, *(new.row for new in plan.new_rows)}
        # More steps than there are stages are never waited for: what is older has been sampled.
        while len(self._awaited) > self.stage.count or any(not touched.isdisjoint(step.rows) for step in self._awaited):
            self._take(tables)

    def settle_all(self, tables: RowTables) -> None:
        while self._awaited:
            self._take(tables)

    def _take(self, tables: RowTables) -> None:
        places = self._awaited.popleft().places
        tokens = torch.empty(len(places), dtype=torch.int32, device=places.device)
        tables.history.recent.view(-1).index_copy_(0, places, self.ring.receive(tokens))
