"""What becomes of sampled tokens: into the rows, on every rank, in the order of steps; and drafts of what follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.batch import ROWS, SAMPLE_INDEX, Batch, BatchBuilder, SampleBatch, Shape
from ..link.plan import StepPlan
from ..parallel.group import Group
from ..speculation.drafter import Drafter
from ..speculation.model_drafter import ModelDrafter
from .graphs import StepGraph
from .pending import Drafts
from .pooling import Pooled
from .prompt_logprobs import PromptScores
from .relay import Awaited, Relay

Cuts = tuple[tuple[int, int], ...]  # these and `postponed` are TokenMask's


@dataclass
class Launched:
    """A step between the runner's `execute` and `sample`."""

    header: Tensor
    shape: Shape
    samples: SampleBatch
    hidden: Tensor  # [≥ S, hidden], rows of padding behind
    scores: PromptScores | None
    pooled: Pooled | None
    started: float
    event: torch.cuda.Event | None
    batch: Batch
    graph: StepGraph | None


class SampledTokens:
    def __init__(
        self, builder: BatchBuilder, relay: Relay | None, group: Group, *, drafter: Drafter | None,
        model_drafter: ModelDrafter | None,
    ) -> None:  # fmt: skip
        """`relay`: where the model has several stages. `group`: the ranks of this stage."""
        self._builder, self._relay, self._group = builder, relay, group
        self._tables = builder.tables
        self._drafter, self._model_drafter = drafter, model_drafter

    def take(self, step: Launched, tokens: Tensor, postponed: tuple[int, ...] = (), cuts: Cuts = ()) -> Drafts:
        """On every rank of the last stage: rank 0's tokens, int32 [S], into the rows; drafts of what may follow."""
        if step.samples.plan.num_samples:
            self._group.broadcast(tokens)
        if self._relay is not None:
            # Who imposes what holds writes into them, also while they are on their way.
            self._relay.hand_round(tokens if self._builder.thresholds is None else tokens.clone())
        kept, proposed = self._append(step.samples.plan, step.header, step.shape, tokens, postponed, cuts)
        if step.graph is not None and step.graph.drafts is not None:
            proposed = step.graph.drafts.replay()
        elif self._model_drafter is not None:
            proposed = self.propose(step.batch, step.header, step.shape)
        return Drafts(kept, proposed)

    def go_on(self, step: Launched, postponed: tuple[int, ...], cuts: Cuts) -> None:
        """On other stages: tokens come when they are needed, if they are."""
        relay, plan = self._relay, step.samples.plan
        assert relay is not None
        if relay.awaits:
            self._builder.advance(plan)
            if plan.num_samples:
                relay.expect(Awaited(plan.of_samples(), postponed, cuts))
            return
        nobody_s = torch.zeros(plan.num_samples, dtype=torch.int32, device=self._tables.device)
        self._builder.commit(step.header, step.shape, nobody_s)
        if postponed:
            self._builder.take_back(plan, postponed, None)

    def settle(self, plan: StepPlan | None) -> None:
        """On other stages: appends the tokens that have come late and that the plan needs; None: all."""
        if self._relay is None or not self._relay.awaits:
            return
        for late, tokens in self._relay.arrived(plan):
            shape = Shape.of(late.plan)
            header = self._builder.header(late.plan, shape).to(self._tables.device, non_blocking=True)
            self._append(late.plan, header, shape, tokens, late.postponed, late.cuts)

    def propose(self, batch: Batch, header: Tensor, shape: Shape) -> Tensor:
        """What the drafting model thinks may follow."""
        assert self._model_drafter is not None
        return self._model_drafter.propose(self._tables, batch, header, shape)

    def _append(
        self, plan: StepPlan, header: Tensor, shape: Shape, tokens: Tensor, postponed: tuple[int, ...], cuts: Cuts
    ) -> tuple[Tensor | None, Tensor | None]:
        """→ `kept` and `proposed` of Drafts."""
        if cuts:
            self._builder.cut_drafts(plan, cuts, tokens)
        kept = self._builder.commit(header, shape, tokens)
        if postponed:
            self._builder.take_back(plan, postponed, kept)
        if self._drafter is None:
            return kept, None
        rows = shape.rows
        return kept, self._drafter.propose(self._tables, header[ROWS, :rows], header[SAMPLE_INDEX, :rows])
