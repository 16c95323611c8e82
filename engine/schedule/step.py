"""A plan in the making, and what the scheduler must remember of it until its result is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..link.plan import AdapterCopy, AxisPositions, BlockWrite, Embed, Encode, NewRow, StateExport, StepPlan
from ..vision.positions import rope_delta
from .kv_cache import KVCacheManager
from .request import Request
from .roster import row_of
from .state_group import Registered

if TYPE_CHECKING:
    from .prompt_results import PromptResults


@dataclass(slots=True, eq=False)
class Step:
    """A plan while it is made, and what its result will need while it is in flight."""

    index: int
    budget: int  # tokens that the step may still compute
    limit: int = field(init=False)  # of them, at its beginning
    total: int = 0  # tokens planned
    num_drafts: int = 0  # of each request that decodes, but for those that take none
    num_drafting: int = 0  # requests with drafts: the first ones of `sampled`
    scheduled: dict[Request, int] = field(default_factory=dict)  # → query length, in the order of the passes
    appended: dict[Request, int] = field(default_factory=dict)  # → entries appended to its block table, hits included
    filled: list[Request] = field(default_factory=list)  # may complete a block in this step
    admitted: dict[Request, int] = field(default_factory=dict)  # → tokens of its prefix hit
    sampled: list[Request | None] = field(default_factory=list)  # None: its sample is to be thrown away
    registered: Registered = field(default_factory=list)
    # → the first token computed: the log-probabilities come from there
    scored: list[tuple[Request, int]] = field(default_factory=list)
    pooled: list[Request | None] = field(default_factory=list)  # whose prompts end here; None: to be thrown away
    adapters: list[AdapterCopy] = field(default_factory=list)  # that get a slot with this step
    exports: list[StateExport] = field(default_factory=list)  # snapshots that it writes
    seeing: set[Request] = field(default_factory=set)  # that begin within or before a picture of theirs
    promised: int = 0  # blocks that prompts which wait for features still need
    forgotten: list[int] = field(default_factory=list)  # entries of features that the device forgets with it
    encode: list[Encode] = field(default_factory=list)  # pictures whose features it makes
    embeds: list[Embed] = field(default_factory=list)
    axes: list[AxisPositions] = field(default_factory=list)
    constrained: bool = False  # a grammar limits what some row samples
    told: list[Request] = field(default_factory=list)  # whose drafts for the step to come its result brings

    def __post_init__(self) -> None:
        self.limit = self.budget

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
                row_of(r), r.id, r.token_ids.tobytes(), r.num_prompt_tokens, r.num_computed_tokens, r.sampling, r.slot,
                *(kv.state.hand_over(r) if kv.state is not None else (-1, -1)),
                rope_delta(r.media, kv.encoder.merge) if r.media and kv.encoder and kv.encoder.three_axes else 0,
            )
            for r in self.admitted
        ]  # fmt: skip
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
            if self.seeing and request in self.seeing:
                self._see(kv, request, index, computed, num_new)
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
        if kv.encoder is not None and rows:
            self.forgotten, self.encode = kv.encoder.hand_over()
        gone = prompts.left() if prompts and rows else []  # others do not see a plan without rows
        scored, pooled = prompts.plan(batch, num_computed, self.scored, self.pooled) if prompts else ([], [])
        return StepPlan(
            self.index, rows, num_tokens, num_computed, sampled, num_decodes, new_rows, new_blocks, scored, pooled,
            self.num_drafts, self.adapters, told, gone, self.exports, self.forgotten, self.encode,
            self.embeds, self.axes,
        )  # fmt: skip

    def _see(self, kv: KVCacheManager, request: Request, index: int, computed: int, num_new: int) -> None:
        """What stands for tokens of pictures among those that row `index` of the plan computes."""
        assert kv.encoder is not None
        self.embeds += kv.encoder.embeds(request, index, computed, num_new)
        if (axes := kv.encoder.axes(request, index, computed, num_new)) is not None:
            self.axes.append(axes)

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
