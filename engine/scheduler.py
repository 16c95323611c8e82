"""Decides which request computes how many tokens in the next step, and takes in what a step has sampled.

One number drives it: a step gives a request some tokens so that `num_computed_tokens` catches up with `target`.
Prefill, chunk, decode, prefix hit and resuming after a preemption are all that subtraction.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from .adapters.book import AdapterBook
from .config import SchedulerConfig
from .invariants import check_scheduler
from .kv_cache import KVCacheManager
from .messages import EngineStats, RequestOutput
from .plan import NOT_FINITE, NOTHING_ALLOWED, StepPlan, StepResult, TokenLogprobs
from .prompt_results import PromptResults
from .request import FinishReason, Request, Status, ending
from .roster import Roster
from .sharing import Sharing
from .speculation.depth import Depth
from .stage_turns import equal_chunk, whose_turn
from .step import Step

Logprobs = list[TokenLogprobs] | None

RUNNING, FINISHED = Status.RUNNING, Status.FINISHED
# So few decodes do not cut the chunk of a prompt short: it would leave a few tokens of a thousand for another step, and
# if the next prompt fills that one, the first has to wait for twice as long.
FEW_DECODES = 16
# Requests without drafts beside those with some: with more, or in a large step, nobody takes any, as there is no CUDA
# graph for that.
BESIDE_DRAFTS = 16
FARTHEST = 1024  # places of the queue that are looked at for somebody who may pass those that have to wait


class Scheduler:
    """Continuous batching over a paged cache: decodes first, then unfinished prefills, then the waiting queue."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_num_seqs <= config.max_num_batched_tokens, "every running request must be able to decode"
        drafted = (min(most, config.max_num_seqs) * (1 + drafts) for most, drafts in config.draft_depths)
        assert max(drafted, default=0) <= config.max_num_batched_tokens, "and with drafts, too"
        assert 1 + config.depth * config.max_drafts <= config.max_num_batched_tokens, "what windows keep of a request"
        assert config.policy in ("fcfs", "priority") and config.depth >= 1
        self.config = config
        self.kv = KVCacheManager(config)
        self.roster = Roster(config.max_num_seqs, by_priority=config.policy == "priority")
        self.in_flight: deque[Step] = deque()
        self.sharing = Sharing.of(config)
        self.prompt_results = PromptResults()
        self.drafting = Depth(config.draft_depths) if config.max_drafts else None
        self.adapters = AdapterBook(config.max_loras, config.max_cpu_loras) if config.max_loras else None
        if self.adapters is not None:
            self.adapters.busy = self._adapters_in_flight
        self.num_constrained = 0  # unfinished requests with a grammar
        self._undelivered: list[RequestOutput] = []  # of requests refused on arrival
        # Beyond this many tokens, the last one's value is needed before the request can go on, if it can at all.
        self.stop = min(config.max_model_len - 1, self.kv.max_tokens)
        self.num_preemptions = 0
        self.preempted: list[int] = []  # ids; whoever reports them empties the list
        self.num_corrupted_requests = 0
        self.num_scheduled_steps = 0
        self.num_steps = 0  # that have returned
        self.step_tokens = 0  # of the last one that has returned
        self.prompt_tokens_computed = 0

    # ---- arrivals and departures ----
    def add(self, request: Request) -> None:
        """Queue a request of validated lengths. One that the cache can never hold ends with the next result: error."""
        room = self.config.max_model_len - (request.sampling.pooling is None)
        assert 0 < request.num_prompt_tokens <= room, "prompt leaves no room for a token"
        assert request.sampling.max_tokens >= 1, "max_tokens must be at least 1"
        if not self.config.enable_chunked_prefill:
            assert request.num_prompt_tokens <= self.config.max_num_batched_tokens, "prompt longer than a step"
        fits = request.num_tokens <= self.kv.max_tokens
        if fits:
            self.kv.extend_hashes(request)  # before it is in any book, lest it stays there when this raises
        request.longest = min(request.num_prompt_tokens + request.sampling.max_tokens, self.stop + 1)
        self.roster.add(request)
        self.num_constrained += request.grammar is not None
        self.prompt_results.add(request)
        if not fits:
            self._undelivered.append(self._finish(request, FinishReason.ERROR, error=self.kv.too_small(request)))

    def abort(self, ids: Iterable[int]) -> list[RequestOutput]:
        """End these requests now; results still in flight for them are ignored. Unknown and finished ids are too."""
        return [self._finish(request, FinishReason.ABORT) for request in self.roster.find(ids)]

    def has_begun(self, ids: Iterable[int]) -> bool:
        """Whether one of these requests has left the queue, or is finished."""
        entries = self.roster.entries
        return any(id not in entries or entries[id][3].first_scheduled is not None for id in ids)

    def reject(self, request: Request, error: str) -> RequestOutput:
        """End an unfinished request now; results still in flight for it are ignored."""
        return self._finish(request, FinishReason.ERROR, error=error)

    def reject_adapter(self, adapter: int, error: str) -> list[RequestOutput]:
        """End every request that has this adapter now."""
        having = [entry[3] for entry in self.roster.entries.values() if entry[3].adapter == adapter]
        return [self.reject(request, error) for request in having]

    def has_unfinished(self) -> bool:
        return bool(self.roster.entries or self._undelivered)

    # ---- building a step ----
    def schedule(self) -> StepPlan | None:
        """The next plan; None when there is nothing to compute now: idle, or all wait for results in flight.

        A plan without rows is there to bring the refusals of `add` with its result.
        """
        if len(self.in_flight) >= self.config.depth or not self.has_unfinished():
            return None
        step = Step(self.num_scheduled_steps, self.config.max_num_batched_tokens)
        num_preemptions = self.num_preemptions
        self._schedule_prefills(step, self._schedule_decodes(step))
        # Only now, when no request of this step can be preempted any more; and before the look-ups of admission, which
        # may hit blocks of this very step: in every layer, the whole batch writes its KV before it attends.
        for request in step.filled:
            if request in step.scheduled:
                self.kv.register(request, request.num_computed_tokens + step.scheduled[request], step.registered)
        if self.num_preemptions == num_preemptions:
            self._admit(step)
        if not step.scheduled and (self.in_flight or not self._undelivered):
            return None
        self.num_scheduled_steps += 1
        self.in_flight.append(step)
        return step.freeze(self.kv, self.prompt_results, self.num_constrained > 0, self.drafting is not None)

    def _schedule_decodes(self, step: Step) -> list[Request]:
        """Pass 1: one token, and drafts of those behind it, for each running request that lacks just one. Returns the
        others."""
        block_size, stop, scheduled = self.config.block_size, self.stop, step.scheduled
        step.num_drafts = most = self.drafting.depth(len(self.roster.running)) if self.drafting is not None else 0
        pooling = self.prompt_results.pooling
        constrained = self.num_constrained > 0
        prefills = []
        running = list(self.roster.running.values())
        if self.config.num_stages > 1:
            running = self._leave_some_to_other_stages(running)
        for request in running:
            computed = request.num_computed_tokens
            total = len(request.token_ids) + request.num_in_flight_tokens
            if total - computed != 1:
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
            mixed = max(large or mixed, decodes + max(1, mixed // 4))
            step.limit = min(step.limit, mixed)
        step.budget = step.limit - (sum(scheduled.values()) if most else len(scheduled))
        return prefills

    def _leave_some_to_other_stages(self, running: list[Request]) -> list[Request]:
        """Without those of the requests that decode who have to wait for a later plan."""
        decodes, others, prompts = [], [], bool(self.roster.waiting)
        for request in running:
            total = len(request.token_ids) + request.num_in_flight_tokens
            if total - request.num_computed_tokens != 1 or request in self.prompt_results.pooling:
                others.append(request)
                prompts = prompts or request.target > request.num_computed_tokens
            elif total < request.longest and (
                (guide := request.grammar) is None or guide.may_decode(request.num_in_flight_tokens)
            ):
                decodes.append(request)
        return others + whose_turn(decodes, self.num_scheduled_steps, self.config.num_stages, prompts)

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
        for request in prefills:
            if self.config.context_cost and request.status is RUNNING:
                room = equal_chunk(
                    step.budget, request.num_computed_tokens, self.config.context_cost, self.config.block_size
                )
                step.limit, step.budget = step.limit - step.budget + room, room
            num_new = min(request.target - request.num_computed_tokens, step.budget, most)
            if request.status is not RUNNING or not num_new:
                continue
            if self._grow(step, request, request.num_computed_tokens + num_new):
                step.filled.append(request)
                step.scheduled[request] = num_new
                step.budget -= num_new

    def _admit(self, step: Step) -> None:
        """Pass 3: the waiting queue, strictly in order unless `sharing` says otherwise; who does not fit holds up those
        behind.

        Budget is left only when no prefill remains unfinished, so blocks of a prompt admitted as a whole but allocated
        by chunks are never promised twice; where prompts share steps, what was promised is counted.
        """
        whole = 0 if self.config.enable_chunked_prefill else self.config.max_num_batched_tokens
        roster, sharing = self.roster, self.sharing
        now = time.monotonic() if roster.waiting else 0.0
        place, most, promised = 0, step.budget, 0
        if self.adapters is not None:
            self.adapters.begin_pass()
        if sharing is not None and roster.waiting:
            sharing.count(roster.running.values(), step, self.kv)
        while roster.waiting and roster.free_rows and step.budget:
            if sharing is not None:
                most, promised = sharing.chunk, sharing.promised
            if (place := self._next(place)) < 0:
                break
            request = roster.waiting[place][3]
            if request.num_in_flight_steps:
                break  # preempted, and a sample of it may be on its way: it has to know all its tokens to start over
            reads = self.prompt_results.reads_cache(request)
            num_new = self.kv.admit(request, min(step.budget, most), whole, reads, promised)
            if not num_new:
                break
            request.own_prompt()
            roster.start(place)
            if self.adapters is not None and request.adapter:
                request.slot, copy = self.adapters.start(request.adapter, request.id)
                if copy is not None:
                    step.adapters.append(copy)
            request.first_scheduled = request.first_scheduled or now
            step.admitted[request] = request.num_computed_tokens
            step.appended[request] = len(self.kv.tables[request.id].groups[0])
            step.scheduled[request] = num_new
            step.budget -= num_new
            self.kv.register(request, request.num_computed_tokens + num_new, step.registered)
            if sharing is not None:
                sharing.note(request, request.num_computed_tokens + num_new, self.kv)

    def _next(self, first: int) -> int:
        """Place in the queue, from `first` on, of who may begin; -1 for nobody. Who may not at one place may not for
        the rest of the pass, so that each place is looked at once."""
        waiting, sharing, adapters = self.roster.waiting, self.sharing, self.adapters
        if sharing is not None and sharing.is_full:
            return -1
        for place in range(first, min(len(waiting), first + FARTHEST)):
            request = waiting[place][3]
            allowed = sharing is None or sharing.allows(request)
            if allowed and (adapters is None or adapters.may_start(request.adapter, request.id)):
                return place
        return -1

    def _adapters_in_flight(self) -> set[int]:
        return {request.adapter for step in self.in_flight for request in step.scheduled}

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
        self._requeue(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(victim.id)

    def postpone(self, requests: Iterable[Request]) -> None:
        """Of the newest step, which nothing is in flight before or behind, these are to sample nothing yet: their last
        token is computed once more when their masks are there. The device has to be told, too."""
        (step,) = self.in_flight
        for request in requests:
            index = step.sampled.index(request)
            num_drafts = step.num_drafts if index < step.num_drafting else 0
            step.sampled[index] = None
            request.num_in_flight_tokens -= 1 + num_drafts
            request.num_in_flight_drafts -= num_drafts
            request.num_computed_tokens -= 1 + num_drafts
            self.kv.unregister(request, request.num_computed_tokens)

    # ---- taking in results ----
    def update(self, result: StepResult) -> list[RequestOutput]:
        """Append what the oldest plan in flight has sampled and end the requests that are done."""
        step = self.in_flight.popleft()
        assert step.index == result.step, f"result of step {result.step}, but the oldest in flight is {step.index}"
        assert len(step.sampled) == len(result.counts or result.token_ids), "samples for each sampled row"
        self.num_steps += 1
        self.step_tokens = step.total
        for planned in step.scheduled:
            planned.num_in_flight_steps -= 1
        outputs, self._undelivered = self._undelivered, []
        if step.scored:
            self.prompt_results.take_scores(step, result)
        for pooled, embedding in zip(step.pooled, result.embeddings, strict=True):
            if pooled and not pooled.finished:
                outputs.append(self._embedded(pooled, embedding))
        if step.num_drafting:
            self._settle(step, result)
        if self.drafting is not None:
            self.drafting.learn(step, result)
        careful = bool(result.errors) or self.num_constrained > 0
        block_size, logprobs, end = self.config.block_size, result.logprobs, 0
        for request, tokens in zip(step.sampled, result.tokens_by_row(), strict=True):
            count = len(tokens)
            end += count
            if request is None:
                continue
            request.num_in_flight_tokens -= count
            if request.status is FINISHED:
                continue
            known = request.token_ids
            before, reason, error = len(known), None, ""
            for token in tokens:
                if careful and (error := self._problem(request, token, result, end - count + len(known) - before)):
                    reason = FinishReason.ERROR
                    break
                known.append(token)
                if (careful or token in request.ends or len(known) >= request.longest) and (
                    reason := ending(request, token)
                ):
                    break
            if len(known) % block_size < count:
                self._cache(request)
            if reason is not None:
                del tokens[len(known) - before :]
            entries = None
            if logprobs:
                entries = [entry for entry in logprobs[end - count : end - count + len(tokens)] if entry] or None
            if reason is not None or before == request.num_prompt_tokens:
                outputs.append(self._milestone(request, tokens, entries, reason, error))
            else:
                outputs.append(RequestOutput(request.id, tokens, None, None, entries))
        for request, drafts in zip(step.told, result.drafts, strict=True):
            if request.grammar is not None and request.grammar.drafted:
                request.grammar.drafts = drafts
        return outputs

    def _milestone(
        self, request: Request, tokens: list[int], logprobs: Logprobs, reason: FinishReason | None, error: str
    ) -> RequestOutput:
        """With its first tokens, or its last."""
        if tokens and request.num_output_tokens == len(tokens):
            self.prompt_tokens_computed += request.num_prompt_tokens - (request.num_cached_tokens or 0)
        if reason is None:
            return self._output(request, tokens, logprobs)
        too_long = request.num_output_tokens >= request.sampling.max_tokens
        if reason is FinishReason.LENGTH and not too_long and request.num_tokens < self.config.max_model_len:
            reason, error = FinishReason.ERROR, self.kv.too_small(request)
        return self._finish(request, reason, tokens, logprobs, error)

    def _problem(self, request: Request, token: int, result: StepResult, place: int) -> str:
        """Why this token of the request is none, or "". `place`: of the token in the result."""
        if place in result.errors:
            if result.errors[place] != NOTHING_ALLOWED:
                self._distrust(request)
            return result.errors[place]
        return request.grammar.accept(token) if request.grammar is not None else ""

    def _cache(self, request: Request) -> None:
        """Blocks have filled with tokens that are known now: others may find those that are computed."""
        self.kv.extend_hashes(request)
        if computed := min(len(request.token_ids), request.num_computed_tokens):
            # By some plan, which may be in flight. Which one does not matter: `fail` revokes what later ones
            # registered, too.
            self.kv.register(request, computed, self.in_flight[-1].registered if self.in_flight else [])

    def _settle(self, step: Step, result: StepResult) -> None:
        """How many drafts were right is known: what counted more comes down to that."""
        for request, count in zip(step.sampled[: step.num_drafting], result.counts, strict=False):
            if request is None:
                continue
            wrong = step.num_drafts + 1 - count
            request.num_in_flight_tokens -= wrong
            request.num_in_flight_drafts -= step.num_drafts
            if request.status is RUNNING:
                request.num_computed_tokens -= wrong

    def _embedded(self, request: Request, embedding: bytes | None) -> RequestOutput:
        """The first and last output of a request whose prompt was pooled."""
        if embedding is None:
            self._distrust(request)
            return self._finish(request, FinishReason.ERROR, error=NOT_FINITE)
        self.prompt_tokens_computed += request.num_prompt_tokens - (request.num_cached_tokens or 0)
        output: RequestOutput = msgspec.structs.replace(self._finish(request, FinishReason.STOP), embedding=embedding)
        return output

    def _distrust(self, request: Request) -> None:
        """Its cached blocks may be the cause of NaN: whoever hit them would fail as well, and so for ever."""
        self.kv.distrust(request)
        self.num_corrupted_requests += 1

    def fail(self, step: int, message: str) -> list[RequestOutput]:
        """A step in flight raised: its requests end with this error.

        Nothing that was registered since can be found again. A request admitted since with a prefix hit may have read
        what the step never wrote: it starts over, its samples in flight are thrown away. Later plans are drained as
        ever.
        """
        failed = next(planned for planned in self.in_flight if planned.index == step)
        later = [planned for planned in self.in_flight if planned.index > step]
        self.in_flight.remove(failed)
        self.num_steps += 1
        for request in failed.scheduled:
            request.num_in_flight_steps -= 1
        for index, sampled in enumerate(failed.sampled):
            if sampled is not None:
                num_drafts = failed.num_drafts if index < failed.num_drafting else 0
                sampled.num_in_flight_tokens -= 1 + num_drafts
                sampled.num_in_flight_drafts -= num_drafts
        for planned in (failed, *later):
            self.kv.revoke(planned.registered)
        outputs, self._undelivered = self._undelivered, []
        for request in failed.scheduled:
            if not request.finished:
                outputs.append(self._finish(request, FinishReason.ERROR, error=message))
        lost = {copy.id for copy in failed.adapters}  # their slots may hold anything
        for planned in later:
            for request in planned.scheduled:
                if request.adapter in lost and not request.finished:
                    outputs.append(self._finish(request, FinishReason.ERROR, error=message))
        if self.adapters is not None:
            self.adapters.forget(lost)
        for planned in later:
            for request, num_hit_tokens in planned.admitted.items():
                if num_hit_tokens and not request.finished:
                    self._restart(request, later)
        return outputs

    def _restart(self, request: Request, later: list[Step]) -> None:
        for planned in later:
            planned.sampled = [None if sampled is request else sampled for sampled in planned.sampled]
            planned.pooled = [None if pooled is request else pooled for pooled in planned.pooled]
        request.num_in_flight_tokens = request.num_in_flight_drafts = 0
        if not request.num_output_tokens:
            request.num_cached_tokens = None
        if request.status is RUNNING:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._leave(request)
        request.num_computed_tokens = 0
        if request.grammar is not None:
            request.grammar.forget_drafts()
        self.roster.requeue(request)

    def _leave(self, request: Request) -> None:
        """It has neither blocks nor a slot any more."""
        self.kv.free(request)
        if self.adapters is not None and request.adapter:
            self.adapters.stop(request.adapter)
            request.slot = -1

    def _finish(
        self, request: Request, reason: FinishReason, tokens: Sequence[int] = (), logprobs: Logprobs = None,
        error: str = "",
    ) -> RequestOutput:  # fmt: skip
        """The one place where a request ends; what it returns is the last that is said about it."""
        if request.status is RUNNING:
            self._leave(request)
        elif self.adapters is not None:
            self.adapters.leave(request.adapter, request.id)
        self.roster.remove(request)
        self.prompt_results.discard(request)
        self.num_constrained -= request.grammar is not None
        request.finish_reason = reason
        return self._output(request, list(tokens), logprobs, error)

    def _output(self, request: Request, tokens: list[int], logprobs: Logprobs, error: str = "") -> RequestOutput:
        first = request.num_output_tokens == len(tokens)
        cached, since = (request.num_cached_tokens, request.first_scheduled) if first else (None, None)
        reason = request.finish_reason and request.finish_reason.value
        scores = None
        if tokens:
            scores, request.prompt_logprobs = request.prompt_logprobs, None
        return RequestOutput(
            request.id, tokens, reason, request.stop_reason, logprobs, cached, since, error or None, scores
        )

    # ---- looking in ----
    def stats(self, device_seconds: float = 0.0, host_seconds: float = 0.0) -> EngineStats:
        """State after the last `update`; the seconds are the caller's to measure."""
        return EngineStats(
            len(self.roster.running), len(self.roster.waiting), self.config.num_blocks - 1, self.kv.num_free_blocks,
            self.num_preemptions, self.kv.prefix_queries, self.kv.prefix_hits, self.num_steps, self.step_tokens,
            self.prompt_tokens_computed, device_seconds, host_seconds,
            num_corrupted_requests=self.num_corrupted_requests, **(self.drafting.counts() if self.drafting else {}),
        )  # fmt: skip

    def check_invariants(self, thorough: bool = False) -> None:
        """Raises InvariantError where the books do not balance, busy or idle. O(requests); `thorough`: O(blocks)."""
        check_scheduler(self, thorough)
