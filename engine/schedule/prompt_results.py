"""What requests want of their prompts themselves, not of what follows them: log-probabilities, embeddings."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import require
from ..link.plan import StepResult
from ..link.sampling_params import LAST
from .request import Request
from .roster import row_of


class PromptResults:
    """The scheduler's books on them. Empty, and false, while nobody asks."""

    def __init__(self) -> None:
        self.scoring: set[Request] = set()  # the log-probabilities of their prompts are still wanted
        self.pooling: set[Request] = set()  # unfinished requests for an embedding
        self._begun: dict[Request, int] = {}  # of whose prompt a part is pooled → the row where that waits

    def __bool__(self) -> bool:
        return bool(self.scoring or self.pooling or self._begun)

    def add(self, request: Request) -> None:
        if request.prompt_logprobs is not None and request.num_prompt_tokens > 1:
            self.scoring.add(request)
        if request.sampling.pooling is not None:
            self.pooling.add(request)

    def discard(self, request: Request) -> None:
        self.scoring.discard(request)
        self.pooling.discard(request)

    def reads_cache(self, request: Request) -> bool:
        """Whether a cached prefix serves: what is not computed has neither log-probabilities nor hidden states."""
        pooling = request.sampling.pooling
        return request not in self.scoring and (pooling is None or pooling.kind == LAST)

    def plan(
        self, batch: list[Request], num_computed: list[int], scored_from: list[tuple[Request, int]],
        pooled_requests: list[Request | None],
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Indexes into the batch of the rows that bring log-probabilities nobody has yet, and of those that are pooled.

        `num_computed`: of each row before this step. `scored_from`, `pooled_requests`: Step's lists, which grow.
        """
        scored, pooled = [], []
        for index, (request, computed) in enumerate(zip(batch, num_computed, strict=True)):
            if request in self.scoring and computed < request.num_prompt_tokens - 1:
                scored.append(index)
                scored_from.append((request, computed))
            if request in self.pooling:
                pooled.append(index)
                if request.num_computed_tokens == request.num_prompt_tokens:
                    pooled_requests.append(request)
                    self._begun.pop(request, None)
                else:
                    self._begun[request] = row_of(request)
        return scored, pooled

    def left(self) -> list[int]:
        """Rows of requests that have left them since the last plan, aborted or preempted, with a part pooled."""
        gone = [request for request, row in self._begun.items() if request.row != row]
        return [self._begun.pop(request) for request in gone]

    def take_scores(self, scored: list[tuple[Request, int]], result: StepResult) -> None:
        """`scored`: those of its step. What a preempted request computes anew is known up to a point: nothing twice."""
        for (request, start), entries in zip(scored, result.prompt_logprobs, strict=True):
            known = request.prompt_logprobs
            if request.finished or known is None:
                continue
            known += entries[len(known) - start :]
            if len(known) == request.num_prompt_tokens - 1:
                self.scoring.discard(request)

    def check(self, live: Iterable[Request]) -> None:
        """Raises InvariantError where the books do not fit the unfinished requests."""
        scoring = {r for r in live if r.prompt_logprobs is not None and _num_unscored(r)}
        require(self.scoring == scoring, "whose prompts are still to be scored")
        require(self.pooling == {r for r in live if r.sampling.pooling is not None}, "whose prompts are pooled")


def _num_unscored(request: Request) -> int:
    return request.num_prompt_tokens - 1 - len(request.prompt_logprobs or ())
