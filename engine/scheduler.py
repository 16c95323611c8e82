"""Decides which request computes how many tokens in the next step, and takes in what a step has sampled.

One number drives it: a step gives a request some tokens so that `num_computed_tokens` catches up with `target`.
Prefill, chunk, decode, prefix hit and resuming after a preemption are all that subtraction.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from .config import SchedulerConfig
from .invariants import check_scheduler
from .kv_cache import KVCacheManager
from .messages import EngineStats, RequestOutput
from .plan import NOT_FINITE, NOTHING_ALLOWED, StepPlan, StepResult, TokenLogprobs
from .prompt_results import PromptResults
from .request import FinishReason, Request, Status
from .roster import Roster
from .sharing import Sharing
from .step import Step

Logprobs = list[TokenLogprobs] | None

RUNNING, FINISHED = Status.RUNNING, Status.FINISHED
# So few decodes do not cut the chunk of a prompt short: it would leave a few tokens of a thousand for another step, and
# if the next prompt fills that one, the first has to wait for twice as long.
FEW_DECODES = 16


class Scheduler:
    """Continuous batching over a paged cache: decodes first, then unfinished prefills, then the waiting queue."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_num_seqs <= config.max_num_batched_tokens, "every running request must be able to decode"
        assert config.policy in ("fcfs", "priority") and config.depth >= 1
        self.config = config
        self.kv = KVCacheManager(config)
        self.roster = Roster(config.max_num_seqs, by_priority=config.policy == "priority")
        self.in_flight: deque[Step] = deque()
        self.sharing = Sharing.of(config)
        self.prompt_results = PromptResults()
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
        return step.freeze(self.kv, self.prompt_results, self.num_constrained > 0)

    def _schedule_decodes(self, step: Step) -> list[Request]:
        """Pass 1: one token for each running request that lacks just one. Returns the others."""
        block_size, stop, scheduled = self.config.block_size, self.stop, step.scheduled
        pooling = self.prompt_results.pooling
        constrained = self.num_constrained > 0
        prefills = []
        for request in list(self.roster.running.values()):
            computed = request.num_computed_tokens
            total = len(request.token_ids) + request.num_in_flight_tokens
            if total - computed != 1:
                prefills.append(request)
                continue
            if (total > stop or total - request.num_prompt_tokens >= request.sampling.max_tokens) and (
                request not in pooling  # nothing is sampled: such a prompt may fill the context
            ):
                continue  # a sure end: the sample in flight is its last
            if request.status is not RUNNING:
                continue  # preempted a moment ago
            if constrained and (guide := request.grammar) and not guide.may_decode(request.num_in_flight_tokens):
                continue  # nobody shall wait for its mask
            offset = computed % block_size
            if offset == 0 and not self._grow(step, request, total):
                continue
            if offset == block_size - 1:
                step.filled.append(request)
            scheduled[request] = 1
        if scheduled and (mixed := self.config.max_mixed_tokens):
            # Beside decodes, prompts come in smaller chunks: nobody waits long for the next token, and who began
            # together does not end together. A long queue gets larger ones, for throughput; a few decodes do not cut a
            # chunk short, and however many there are, a quarter is left to prompts.
            decodes = len(scheduled)
            if decodes <= FEW_DECODES:
                mixed += decodes
            if large := self.config.large_mixed_tokens:
                each = self.roster.num_waiting_tokens // self.config.backlog_steps
                mixed = max((size for size in large if size <= each), default=mixed)
            mixed = max(mixed, decodes + max(1, mixed // 4))
            step.limit = min(step.limit, mixed)
        step.budget = step.limit - len(scheduled)
        return prefills

    def _schedule_prefills(self, step: Step, prefills: list[Request]) -> None:
        """Pass 2: prompts (and all tokens of resumed requests) begun in an earlier step, in the order of admission."""
        if self.sharing is not None:
            self.sharing.begin(step.budget, len(prefills) + len(self.roster.waiting))
        most = step.budget if self.sharing is None else self.sharing.chunk
        for request in prefills:
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
        if sharing is not None and roster.waiting:
            sharing.count(roster.running.values(), step, self.kv)
        while roster.waiting and roster.free_rows and step.budget:
            if sharing is not None:
                place, most, promised = sharing.next(roster.waiting), sharing.chunk, sharing.promised
                if place < 0:
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
            request.first_scheduled = request.first_scheduled or now
            step.admitted[request] = request.num_computed_tokens
            step.appended[request] = len(self.kv.tables[request.id].groups[0])
            step.scheduled[request] = num_new
            step.budget -= num_new
            self.kv.register(request, request.num_computed_tokens + num_new, step.registered)
            if sharing is not None:
                sharing.note(request, request.num_computed_tokens + num_new, self.kv)

    def _grow(self, step: Step, request: Request, num_tokens: int) -> bool:
        """Blocks for this many tokens, preempting the least important requests as long as there is no room.

        False when that was the request itself. It never is for the most important one: alone, every request fits.
        """
        while (appended := self.kv.grow(request, num_tokens)) < 0:
            victim = self.roster.least_important()
            self._preempt(step, victim)
            if victim is request:
                return False
        if appended:
            step.appended[request] = appended
        return True

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
            step.sampled[step.sampled.index(request)] = None
            request.num_in_flight_tokens -= 1
            request.num_computed_tokens -= 1
            self.kv.unregister(request, request.num_computed_tokens)

    # ---- taking in results ----
    def update(self, result: StepResult) -> list[RequestOutput]:
        """Append what the oldest plan in flight has sampled and end the requests that are done."""
        step = self.in_flight.popleft()
        assert step.index == result.step, f"result of step {result.step}, but the oldest in flight is {step.index}"
        assert len(step.sampled) == len(result.token_ids), "one sample for each sampled row"
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
        constrained = self.num_constrained > 0
        block_size, max_model_len, logprobs = self.config.block_size, self.config.max_model_len, result.logprobs
        for index, (request, token) in enumerate(zip(step.sampled, result.token_ids, strict=True)):
            if request is None:
                continue
            request.num_in_flight_tokens -= 1
            if request.status is FINISHED:
                continue
            if index in result.errors:
                if result.errors[index] != NOTHING_ALLOWED:
                    self._distrust(request)
                outputs.append(self._finish(request, FinishReason.ERROR, error=result.errors[index]))
                continue
            if constrained and request.grammar is not None and (error := request.grammar.accept(token)):
                outputs.append(self._finish(request, FinishReason.ERROR, error=error))
                continue
            tokens, sampling = request.token_ids, request.sampling
            tokens.append(token)
            num_outputs = len(tokens) - request.num_prompt_tokens
            if num_outputs == 1:
                self.prompt_tokens_computed += request.num_prompt_tokens - (request.num_cached_tokens or 0)
            if len(tokens) % block_size == 0:
                self.kv.extend_hashes(request)
                if request.num_computed_tokens >= len(tokens):
                    # By some plan in flight. Which one does not matter: `fail` revokes what later ones registered, too.
                    self.kv.register(request, len(tokens), self.in_flight[-1].registered)
            reason, error = None, ""
            if num_outputs >= sampling.min_tokens and token in sampling.eos_token_ids and not sampling.ignore_eos:
                reason = FinishReason.STOP
            elif num_outputs >= sampling.min_tokens and token in sampling.stop_token_ids:
                reason, request.stop_reason = FinishReason.STOP, token
            elif constrained and request.grammar is not None and request.grammar.terminated:
                reason = FinishReason.STOP
            elif num_outputs >= sampling.max_tokens or len(tokens) >= max_model_len:
                reason = FinishReason.LENGTH
            elif len(tokens) > self.stop:
                reason, error = FinishReason.ERROR, self.kv.too_small(request)
            entry = [chosen] if logprobs and (chosen := logprobs[index]) else None
            if reason is not None:
                outputs.append(self._finish(request, reason, [token], entry, error))
            elif num_outputs == 1:
                outputs.append(self._output(request, [token], entry))
            else:
                outputs.append(RequestOutput(request.id, [token], None, None, entry))
        return outputs

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
        for sampled in filter(None, failed.sampled):
            sampled.num_in_flight_tokens -= 1
        for planned in (failed, *later):
            self.kv.revoke(planned.registered)
        outputs, self._undelivered = self._undelivered, []
        for request in failed.scheduled:
            if not request.finished:
                outputs.append(self._finish(request, FinishReason.ERROR, error=message))
        for planned in later:
            for request, num_hit_tokens in planned.admitted.items():
                if num_hit_tokens and not request.finished:
                    self._restart(request, later)
        return outputs

    def _restart(self, request: Request, later: list[Step]) -> None:
        for planned in later:
            planned.sampled = [None if sampled is request else sampled for sampled in planned.sampled]
            planned.pooled = [None if pooled is request else pooled for pooled in planned.pooled]
        request.num_in_flight_tokens = 0
        if not request.num_output_tokens:
            request.num_cached_tokens = None
        if request.status is RUNNING:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.roster.requeue(request)

    def _finish(
        self, request: Request, reason: FinishReason, tokens: Sequence[int] = (), logprobs: Logprobs = None,
        error: str = "",
    ) -> RequestOutput:  # fmt: skip
        """The one place where a request ends; what it returns is the last that is said about it."""
        if request.status is RUNNING:
            self.kv.free(request)
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
            num_corrupted_requests=self.num_corrupted_requests,
        )  # fmt: skip

    def check_invariants(self, thorough: bool = False) -> None:
        """Raises InvariantError where the books do not balance, busy or idle. O(requests); `thorough`: O(blocks)."""
        check_scheduler(self, thorough)
