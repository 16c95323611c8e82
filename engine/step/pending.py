"""A step on its way from the device: what is waited for, and the result that is made of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..layers.routing import ExpertCounter
from ..link.plan import NOT_FINITE, NOTHING_ALLOWED, StepPlan, StepResult, TokenLogprobs
from .pooling import Pooled
from .prompt_logprobs import PromptScores
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
    host: list[Tensor]
    samples: Samples
    drafts: Drafts
    scores: PromptScores | None
    pooled: Pooled | None
    started: float
    events: tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event] | None = None  # start, end, copied
    held: list[Tensor] | None = None
    experts: Tensor | None = None  # ExpertLoad.counts, on the host
    counter: ExpertCounter | None = None

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
        result = StepResult(self.plan.step, tokens, logprobs, errors, seconds, scores, embeddings)
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
    places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    found = {place: new for new, place in enumerate(places.tolist())}
    return msgspec.structs.replace(
        result,
        token_ids=[result.token_ids[place] for place in found],
        logprobs=result.logprobs and [result.logprobs[place] for place in found],
        errors={found[place]: error for place, error in result.errors.items() if place in found},
        counts=counts.tolist(),
        drafted=np.minimum(kept[1, :decodes], query_len - 1).tolist(),
    )
