"""What a stage of a pipeline has beside its layers: hidden states that come and go, and tokens that come later.

The last stage samples, and the first one computes the next steps meanwhile. What it does not need to know yet it does
not wait for: a step's tokens are taken from the ring only when a plan touches one of their rows. The stages between do
without, unless there are drafts: then how far a row has come is known with its tokens alone. So each stage hands them
on, and all verify and draft for themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..link.plan import StepPlan
from ..parallel.pipeline import Ring, Stage


@dataclass
class Awaited:
    """The tokens of a step, which the last stage has still to sample, or has sampled already."""

    plan: StepPlan  # of the rows that sample
    postponed: tuple[int, ...]  # these are TokenMask's
    cuts: tuple[tuple[int, int], ...]


class Relay:
    def __init__(
        self, stage: Stage, hidden_size: int, dtype: torch.dtype, device: torch.device, drafts: bool = False
    ) -> None:
        """`drafts`: steps may have some."""
        assert stage.ring is not None
        self.stage, self.ring = stage, stage.ring
        self.awaits = stage.is_first or (drafts and not stage.is_last)
        self._hands_on = drafts and stage.index < stage.count - 2
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
        Ring.half_steps += 1
        if not self.stage.is_first:
            self.ring.receive(self.residual(num_tokens))

    def hand_over(self, num_tokens: int) -> None:
        Ring.half_steps += 1
        self.ring.send(self.residual(num_tokens).clone())  # the next step may be faster than the ring

    # ---- tokens ----

    def hand_round(self, tokens: Tensor) -> None:
        """Of the last stage, when a step is over: what it has sampled, if anything."""
        Ring.half_steps += 1
        if len(tokens):
            self.ring.send(tokens)

    def expect(self, step: Awaited) -> None:
        """When a step is over that has sampled: its tokens will come."""
        self._awaited.append(step)

    def arrived(self, plan: StepPlan | None = None) -> Iterator[tuple[Awaited, Tensor]]:
        """Before a plan runs: steps whose tokens its rows need, or that need its rows, with these, int32 [S]; None: all
        there are."""
        touched = set() if plan is None else {*plan.rows, *(new.row for new in plan.new_rows)}
        # More steps than there are stages are never waited for: what is older has been sampled.
        while self._awaited and (
            plan is None
            or len(self._awaited) > self.stage.count
            or any(not touched.isdisjoint(step.plan.rows) for step in self._awaited)
        ):
            step = self._awaited.popleft()
            tokens = torch.empty(step.plan.num_samples, dtype=torch.int32, device=self._stream.device)
            self.ring.receive(tokens)
            if self._hands_on:
                self.ring.send(tokens)
            yield step, tokens
