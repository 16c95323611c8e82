"""What becomes of sampled tokens: on the device, and on their way to the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..cache.batch import ROWS, SAMPLE_INDEX, Batch, BatchBuilder, SampleBatch, Shape
from ..layers.routing import ExpertCounter
from ..link.plan import NOT_FINITE, NOTHING_ALLOWED, StepPlan, StepResult, TokenLogprobs
from ..parallel.group import Group
from ..speculation.drafter import Drafter
from ..speculation.model_drafter import ModelDrafter
from .graphs import StepGraph
from .prompt_results import Pooled, PromptScores
from .relay import Awaited, Relay
from .sampler import Samples


@dataclass
class Drafts:
    kept: Tensor | None  # of BatchBuilder.commit, where drafts were verified
    proposed: Tensor | None  # int32 [rows], of a Drafter
    told: Tensor | None = None  # of BatchBuilder.tell_drafts, where the plan wants that

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.kept, self.proposed, self.told) if tensor is not None]


@dataclass
class Pending:
    """A step on its way. The device tensors are held until the copies out of them have been made."""

    plan: StepPlan
    samples: Samples
    drafts: Drafts
    scores: PromptScores | None
    pooled: Pooled | None
    started: float
    host: list[Tensor]
    events: tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event] | None = None  # start, end, copied
    held: list[Tensor] | None = None
    experts: Tensor | None = None  # ExpertLoad.counts, on the host
    counter: ExpertCounter | None = None
    unseen: dict[int, str] = field(default_factory=dict)  # see StepResult

    def wait(self) -> StepResult:
        """Blocks (without the GIL) until the step is over. May be called on any thread."""
        if self.events is not None:
            self.events[2].synchronize()
            seconds = self.events[0].elapsed_time(self.events[1]) / 1e3
        else:
            seconds = time.perf_counter() - self.started
        host = iter(self.host)
        tokens, finite = next(host).tolist(), next(host).numpy()
        ours = self.drafts
        kept, proposed, told = (
            next(host).numpy() if tensor is not None else None for tensor in (ours.kept, ours.proposed, ours.told)
        )
        errors = {}
        if self.samples.possible is not None:
            errors = dict.fromkeys(np.flatnonzero(~next(host).numpy()).tolist(), NOTHING_ALLOWED)
        if not finite.all():
            for i in np.flatnonzero(~finite):
                errors[int(i)] = NOT_FINITE
        embeddings = self.pooled.embeddings(next(host)) if self.pooled is not None else []
        logprobs: list[TokenLogprobs | None] | None = None
        if self.samples.logprob_rows is not None:
            logprobs = [None] * len(tokens)
            values, ranks, ids, tops = (next(host).tolist() for _ in range(4))
            for j, i in enumerate(self.samples.logprob_rows):
                logprobs[i] = TokenLogprobs(values[j], ranks[j], ids[j], tops[j])
        scores = self.scores.lists(*host) if self.scores is not None else []
        result = StepResult(self.plan.step, tokens, logprobs, errors, seconds, scores, embeddings, unseen=self.unseen)
        if self.experts is not None and self.counter is not None:
            tokens_of_experts, imbalance = self.counter.take(self.experts)
            result = msgspec.structs.replace(
                result, expert_tokens=tokens_of_experts, expert_imbalance=imbalance
            )  # fmt: skip
        if proposed is not None:
            result = msgspec.structs.replace(result, num_proposed=int(np.count_nonzero(proposed)))
        if told is not None:
            result = msgspec.structs.replace(result, drafts=[row[1 : 1 + row[0]].tolist() for row in told])
        return result if kept is None else keep(result, self.plan, kept)


def keep(result: StepResult, plan: StepPlan, kept: np.ndarray) -> StepResult:
    """A step's result without what was sampled behind wrong drafts. kept: int32 [2, ≥ num_decodes], tokens that each
    row keeps, and drafts that had been proposed to it."""
    decodes, query_len = plan.num_decodes, 1 + plan.num_drafts
    counts = np.ones(len(plan.sampled), dtype=np.int64)
    counts[:decodes] = kept[0, :decodes]
    starts = np.arange(len(counts)) + np.minimum(np.arange(len(counts)), decodes) * plan.num_drafts
    indexes = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    found = {index: new for new, index in enumerate(indexes.tolist())}
    return msgspec.structs.replace(
        result,
        token_ids=[result.token_ids[index] for index in found],
        logprobs=result.logprobs and [result.logprobs[index] for index in found],
        errors={found[index]: error for index, error in result.errors.items() if index in found},
        counts=counts.tolist(),
        drafted=np.minimum(kept[1, :decodes], query_len - 1).tolist(),
    )


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
