"""A plan in the making, and what the scheduler must remember of it until its result is in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..link.plan import AdapterCopy, BlockWrite, NewRow, StepPlan
from .kv_cache import KVCacheManager, Registered
from .request import Request
from .roster import row_of

if TYPE_CHECKING:
    from .prompt_results import PromptResults


class Step:
    """A plan while it is made, and what its result will need while it is in flight."""

    __slots__ = (
        "adapters",
        "admitted",
        "appended",
        "budget",
        "constrained",
        "filled",
        "index",
        "limit",
        "num_drafting",
        "num_drafts",
        "pooled",
        "registered",
        "sampled",
        "scheduled",
        "scored",
        "told",
        "total",
    )

    def __init__(self, index: int, budget: int) -> None:
        self.index = index
        self.limit = budget  # tokens the step may compute
        self.budget = budget  # of them left
        self.total = 0  # tokens planned
        self.num_drafts = 0  # of each request that decodes, but for those that take none
        self.num_drafting = 0  # requests with drafts: the first ones of `sampled`
        self.scheduled: dict[Request, int] = {}  # → query length, in the order of the passes
        self.appended: dict[Request, int] = {}  # → entries appended to its block table, hits included
        self.filled: list[Request] = []  # may complete a block in this step
        self.admitted: dict[Request, int] = {}  # → tokens of its prefix hit
        self.sampled: list[Request | None] = []  # None: its sample is to be thrown away
        self.registered: Registered = []
        self.scored: list[tuple[Request, int]] = []  # → the first token computed: the log-probabilities come from there
        self.pooled: list[Request | None] = []  # whose prompts end in this step; None: to be thrown away
        self.adapters: list[AdapterCopy] = []  # that get a slot with this step
        self.constrained = False  # a grammar limits what some row samples
        self.told: list[Request] = []  # whose drafts for the step to come its result brings

    def freeze(self, kv: KVCacheManager, prompts: PromptResults, some_have_grammars: bool, drafts: bool) -> StepPlan:
        """The plan, which shares nothing with the scheduler. What it computes counts as computed from here on.

        `drafts`: somebody drafts.
        """
        scheduled = self.scheduled
        batch = self._drafting() if self.num_drafts else []
        self.num_drafting = num_decodes = len(batch)
        if batch:
            drafting = set(batch)
            batch += [request for request in scheduled if request not in drafting]
        else:
            self.num_drafts = 0
            batch = [request for request, num_new in scheduled.items() if num_new == 1]
            num_decodes = len(batch)
            if num_decodes < len(scheduled):
                batch += [request for request, num_new in scheduled.items() if num_new != 1]
        new_rows = [
            NewRow(
                row_of(r), r.id, r.token_ids.tobytes(), r.num_prompt_tokens, r.num_computed_tokens, r.sampling, r.slot
            )
            for r in self.admitted
        ]
        new_blocks: list[list[BlockWrite]] = [[] for _ in range(kv.num_groups)]
        for request, count in self.appended.items():
            table = kv.tables[request.id]
            for writes, blocks, left in zip(new_blocks, table.groups, table.left, strict=True):
                start = max(len(blocks) - count, left)  # of a hit, what a window does not see is not worth sending
                writes.append(BlockWrite(row_of(request), start, blocks[start:]))
        rows: list = []  # of int, every scheduled request has a row; the type checker is not worth a call each
        num_tokens, num_computed, sampled = [], [], []
        pooling = prompts.pooling
        for index, request in enumerate(batch):
            num_new, computed = scheduled[request], request.num_computed_tokens
            rows.append(request.row)
            num_tokens.append(num_new)
            num_computed.append(computed)
            request.num_computed_tokens = computed = computed + num_new
            request.num_in_flight_steps += 1
            num_drafts = computed - len(request.token_ids) - request.num_in_flight_tokens
            if num_drafts >= 0 and request not in pooling:
                sampled.append(index)
                self.sampled.append(request)
                request.last_sampled = self.index
                request.num_in_flight_tokens += 1 + num_drafts
                if num_drafts:
                    request.num_in_flight_drafts += num_drafts
        self.total = self.limit - self.budget
        told: list[int] = []
        if some_have_grammars:
            self.constrained = any(
                request and request.grammar and request.grammar.binds(request.num_in_flight_tokens - 1)
                for request in self.sampled
            )
            if drafts:
                told = self._tell()
        gone = prompts.left() if prompts and rows else []  # others do not see a plan without rows
        scored, pooled = prompts.plan(batch, num_computed, self.scored, self.pooled) if prompts else ([], [])
        return StepPlan(
            self.index, rows, num_tokens, num_computed, sampled, num_decodes, new_rows, new_blocks, scored, pooled,
            self.num_drafts, self.adapters, told, gone,
        )  # fmt: skip

    def _drafting(self) -> list[Request]:
        """Who computes more tokens than there are."""
        return [r for r, num_new in self.scheduled.items() if r.num_computed_tokens + num_new > r.target]

    def _tell(self) -> list[int]:
        """A mask of the tokens behind drafts needs to know these."""
        told = []
        for index, request in enumerate(self.sampled):
            if request is not None and request.grammar is not None:
                request.grammar.drafted = True
                self.told.append(request)
                told.append(index)
        return told
