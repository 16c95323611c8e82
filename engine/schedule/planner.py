"""Decides which request computes how many tokens in the next step, and who has to go back to the queue for that.

One number drives it: a step gives a request some tokens so that `num_computed_tokens` catches up with `target`.
Prefill, chunk, decode, prefix hit and resuming after a preemption are all that subtraction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice

from ..adapters.book import AdapterBook
from ..options.scheduler_config import SchedulerConfig
from .kv_cache import KVCacheManager
from .prompt_results import PromptResults
from .request import Request, Status
from .roster import Entry, Roster
from .sharing import Depth, Sharing, equal_chunk, whose_turn
from .step import Step

RUNNING = Status.RUNNING
# So few decodes do not cut the chunk of a prompt short: it would leave a few tokens of a thousand for another step, and
# if the next prompt fills that one, the first has to wait for twice as long.
FEW_DECODES = 16
# Requests without drafts beside those with some: with more, or in a large step, nobody takes any, as there is no CUDA
# graph for that.
BESIDE_DRAFTS = 16
FARTHEST = 1024  # requests of the queue that are looked at for somebody who may pass those that have to wait


class Planner:
    """Decodes first, then unfinished prefills, then the waiting queue."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, roster: Roster, prompt_results: PromptResults,
        adapters: AdapterBook | None, stop: int,
    ) -> None:  # fmt: skip
        """The scheduler's books; `stop`: tokens beyond which a request cannot go on before the last one is known."""
        self.config, self.kv, self.roster, self.prompt_results = config, kv, roster, prompt_results
        self.adapters, self.stop = adapters, stop
        self.sharing = Sharing.of(config)
        self.drafting = Depth(config.draft_depths) if config.max_drafts else None
        self.num_preemptions = 0
        self.preempted: list[int] = []  # ids; whoever reports them empties the list
        self.num_left = 0  # requests that the last plan left in the queue

    def fill(self, step: Step) -> None:
        """Requests and their tokens into the step, blocks for them, and those without a block back to the queue."""
        num_preemptions = self.num_preemptions
        prefills = self._schedule_decodes(step)
        if self.kv.encoder is not None:
            self.kv.encoder.begin(beside_decodes=bool(step.scheduled))
        self._schedule_prefills(step, prefills)
        # Only now, when no request of this step can be preempted any more; and before the look-ups of admission, which
        # may hit blocks of this very step: in every layer, the whole batch writes its KV before it attends.
        for request in step.filled:
            if request in step.scheduled:
                self.kv.register(request, request.num_computed_tokens + step.scheduled[request], step.registered)
        self._export(step, step.scheduled)
        if self.num_preemptions == num_preemptions:
            self._admit(step)
        self.num_left = len(self.roster.waiting)

    def _schedule_decodes(self, step: Step) -> list[Request]:
        """Pass 1: one token, and drafts of those behind it, for each running request that lacks just one. Returns the
        others."""
        block_size, stop, scheduled = self.config.block_size, self.stop, step.scheduled
        step.num_drafts = most = self.drafting.depth(len(self.roster.running)) if self.drafting is not None else 0
        pooling = self.prompt_results.pooling
        constrained, sees = self.roster.num_constrained > 0, self.kv.encoder is not None
        prefills = []
        running = list(self.roster.running.values())
        if self.config.pipeline_parallel_size > 1:
            running = self._leave_some_to_other_stages(step, running)
        for request in running:
            computed = request.num_computed_tokens
            total = len(request.token_ids) + request.num_in_flight_tokens
            if total - computed != 1 or (sees and computed < request.media_end):
                prefills.append(request)
                continue
            if (
                total >= request.longest
                and request not in pooling  # nothing is sampled: such a prompt may fill the context
                and (total > stop or not self._may_go_on(request))
            ):
                continue  # a sure end: the sample in flight is its last
            if request.status is not RUNNING:
                continue  # preempted a moment ago
            if constrained and (guide := request.grammar) and not guide.may_decode(request.num_in_flight_tokens):
                continue  # nobody shall wait for its mask
            offset = computed % block_size
            if offset == block_size - 1:
                step.filled.append(request)
            if offset or self._grow(step, request, total):
                scheduled[request] = 1
        large = self._large_step() if scheduled else 0
        if most:
            most = step.num_drafts = 0 if large else self._schedule_drafts(step, most, len(prefills))
        if scheduled and (mixed := self.config.max_mixed_tokens):
            # Beside decodes, prompts come in smaller chunks: nobody waits long for the next token, and who began
            # together does not end together. A long queue gets larger ones, for throughput; a few decodes do not cut a
            # chunk short, and however many there are, a quarter is left to prompts.
            decodes = sum(scheduled.values()) if most else len(scheduled)  # tokens of theirs
            if len(scheduled) <= FEW_DECODES:
                mixed += len(scheduled)
            mixed = max(large or mixed, decodes + max(self.config.least_chunk, mixed // 4))
            step.limit = min(step.limit, mixed)
        step.budget = step.limit - (sum(scheduled.values()) if most else len(scheduled))
        return prefills

    def _leave_some_to_other_stages(self, step: Step, running: list[Request]) -> list[Request]:
        """Without those of the requests that decode who have to wait for a later plan."""
        decodes, others, prompts = [], [], bool(self.roster.waiting)
        for request in running:
            computed, total = request.num_computed_tokens, len(request.token_ids) + request.num_in_flight_tokens
            if total - computed != 1 or computed < request.media_end or request in self.prompt_results.pooling:
                others.append(request)
                prompts = prompts or request.target > request.num_computed_tokens
            elif total < request.longest and (
                (guide := request.grammar) is None or guide.may_decode(request.num_in_flight_tokens)
            ):
                decodes.append(request)
        return others + whose_turn(decodes, step.index, self.config.pipeline_parallel_size, prompts)

    def _large_step(self) -> int:
        """Tokens of a step that works off a long queue; 0: the queue is none."""
        sizes = self.config.large_mixed_tokens
        if not sizes or not self.config.max_mixed_tokens:
            return 0
        each = self.roster.num_waiting_tokens // self.config.backlog_steps
        return max((size for size in sizes if size <= each), default=0)

    def _schedule_drafts(self, step: Step, most: int, num_prefills: int) -> int:
        """Drafts behind the tokens that are planned, once all of those have their blocks. Returns how many each takes
        who takes any; 0: nobody does."""
        drafting = [
            request
            for request in step.scheduled
            if self._may_draft(request, end := request.target + most) and self._extend(step, request, end)
        ]
        beside = len(step.scheduled) - len(drafting) + num_prefills + len(self.roster.waiting)
        if not drafting or beside > BESIDE_DRAFTS:
            return 0  # blocks that some have taken for drafts will be used
        step.scheduled.update(dict.fromkeys(drafting, 1 + most))
        return most

    def _may_go_on(self, request: Request) -> bool:
        """Whether wrong drafts in flight may leave it a token short of its max_tokens."""
        sure = request.target - request.num_in_flight_drafts
        return sure - request.num_prompt_tokens < request.sampling.max_tokens

    def _may_draft(self, request: Request, total: int) -> bool:
        """Whether a step may compute drafts of this request's tokens up to `total`: its context and the cache must hold
        them, and its grammar has to know them."""
        if total > self.stop or request in self.prompt_results.pooling:
            return False
        if request.grammar is None:
            return True
        return self.config.drafts_with_grammars and request.grammar.may_draft(total - len(request.token_ids))

    def _schedule_prefills(self, step: Step, prefills: list[Request]) -> None:
        """Pass 2: prompts (and all tokens of resumed requests) begun in an earlier step, in the order of admission."""
        if self.sharing is not None:
            self.sharing.begin(step.budget, len(prefills) + len(self.roster.waiting))
        most = step.budget if self.sharing is None else self.sharing.chunk
        context_cost, least = self.config.context_cost, self.config.least_chunk
        unit = max(self.config.block_size, self.config.grain)
        for request in prefills:
            if request.status is not RUNNING:
                continue
            if context_cost:
                room = equal_chunk(step.budget, request.num_computed_tokens, context_cost, unit)
                room = max(room, min(least, step.budget))
                step.limit, step.budget = step.limit - step.budget + room, room
            num_new = self.kv.chunk(request, min(step.budget, most))
            if num_new and self._grow(step, request, request.num_computed_tokens + num_new):
                step.filled.append(request)
                step.scheduled[request] = num_new
                step.budget -= num_new
                self._see(step, request)
            if request.media and request.status is RUNNING:
                step.promised += self.kv.num_blocks_missing(request)

    def _admit(self, step: Step) -> None:
        """Pass 3: the waiting queue, strictly in turn unless `sharing` says otherwise; who does not fit holds up those
        behind.

        Budget is left only when no prefill remains unfinished, so blocks of a prompt admitted as a whole but allocated
        by chunks are never promised twice; where prompts share steps, what was promised is counted.
        """
        whole = 0 if self.config.enable_chunked_prefill else self.config.max_num_batched_tokens
        roster, sharing = self.roster, self.sharing
        now = time.monotonic() if roster.waiting else 0.0
        queue = roster.waiting.in_turn()
        if self.adapters is not None:
            self.adapters.begin_pass()
        if sharing is not None and roster.waiting:
            sharing.count(roster.running.values(), step, self.kv)
        while roster.waiting and roster.free_rows and step.budget:
            most, promised = step.budget, step.promised
            if sharing is not None:
                most, promised = sharing.chunk, sharing.promised
            if (entry := self._next(queue)) is None:
                break
            request = entry[3]
            if request.num_in_flight_steps:
                break  # preempted, and a sample of it may be on its way: it has to know all its tokens to start over
            reads = self.prompt_results.reads_cache(request)
            num_new = self.kv.admit(request, min(step.budget, most), whole, reads, promised)
            if not num_new:
                break
            request.own_prompt()
            roster.start(entry)
            if self.adapters is not None and request.adapter:
                request.slot, copy = self.adapters.start(request.adapter, request.id)
                if copy is not None:
                    step.adapters.append(copy)
            request.first_scheduled = request.first_scheduled or now
            step.admitted[request] = request.num_computed_tokens
            step.appended[request] = len(self.kv.tables[request.id].groups[0])
            step.scheduled[request] = num_new
            step.budget -= num_new
            self._see(step, request)
            if request.media:
                step.promised += self.kv.num_blocks_missing(request)
            self.kv.register(request, request.num_computed_tokens + num_new, step.registered)
            self._export(step, [request])
            if sharing is not None:
                sharing.note(request, request.num_computed_tokens + num_new, self.kv)

    def _see(self, step: Step, request: Request) -> None:
        """What the tokens of it that the step computes need of its pictures."""
        if (encoder := self.kv.encoder) is None:
            return
        cost = min(encoder.take(request, step.scheduled[request]), step.budget)
        step.limit, step.budget = step.limit - cost, step.budget - cost
        if request.num_computed_tokens < request.media_end:
            step.seeing.add(request)

    def _export(self, step: Step, requests: Iterable[Request]) -> None:
        """Snapshots of the recurrent states that these requests pass in this step, which none of them can be preempted
        out of any more. The last free slot is left to whoever waits."""
        if (state := self.kv.state) is None:
            return
        num_spare = int(bool(self.roster.waiting and self.roster.free_rows))
        for request in requests:
            num_new, computed = step.scheduled[request], request.num_computed_tokens
            if computed % state.interval > state.doubt and (num_new == 1 or computed + 1 == request.target):
                continue  # it decodes, and no boundary is near
            if (export := state.export(request, num_new, num_spare, step.registered)) is not None:
                step.exports.append(export)

    def _next(self, queue: Iterator[Entry[Request]]) -> Entry[Request] | None:
        """Of the rest of the queue, who may begin; None for nobody. Who may not in its turn may not for the rest of the
        pass, so that each is looked at once."""
        sharing, adapters = self.sharing, self.adapters
        if sharing is not None and sharing.is_full:
            return None
        for entry in islice(queue, FARTHEST):
            request = entry[3]
            allowed = sharing is None or sharing.allows(request)
            if allowed and (adapters is None or adapters.may_start(request.adapter, request.id)):
                return entry
        return None

    def _grow(self, step: Step, request: Request, num_tokens: int) -> bool:
        """Blocks for this many tokens, preempting the least important requests as long as there is no room.

        False when that was the request itself. It never is for the most important one: alone, every request fits.
        """
        while not self._extend(step, request, num_tokens):
            victim = self.roster.least_important()
            self._preempt(step, victim)
            if victim is request:
                return False
        return True

    def _extend(self, step: Step, request: Request, num_tokens: int) -> bool:
        """Blocks for this many tokens, if there is room: for what may turn out wrong nobody is preempted."""
        if (appended := self.kv.grow(request, num_tokens)) > 0:
            step.appended[request] = step.appended.get(request, 0) + appended
        return appended >= 0

    def _preempt(self, step: Step, victim: Request) -> None:
        """Back to the queue; what this step had planned for it is handed back. Samples in flight will be kept."""
        step.budget += step.scheduled.pop(victim, 0)
        step.appended.pop(victim, None)
        step.seeing.discard(victim)
        self.requeue(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(victim.id)

    def requeue(self, request: Request) -> None:
        """A running one waits again, and starts over."""
        self.leave(request)
        request.num_computed_tokens = 0
        if request.grammar is not None:
            request.grammar.forget_drafts()
        self.roster.requeue(request)

    def leave(self, request: Request) -> None:
        """It has neither blocks nor a slot any more."""
        self.kv.free(request)
        if self.adapters is not None and request.adapter:
            self.adapters.stop(request.adapter)
            request.slot = -1
