"""The unfinished requests from arrival to end: has steps planned of them, and takes in what these have sampled."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..adapters.book import AdapterBook
from ..errors import ConfigError, require
from ..link.messages import EngineStats, RequestOutput
from ..link.plan import NOT_FINITE, NOTHING_ALLOWED, StepPlan, StepResult, TokenLogprobs
from ..options.scheduler_config import SchedulerConfig
from .kv_cache import KVCacheManager
from .planner import Planner
from .prompt_results import PromptResults
from .request import FinishReason, Request, Status, ending
from .roster import Roster
from .step import Step

Logprobs = list[TokenLogprobs] | None

RUNNING, FINISHED = Status.RUNNING, Status.FINISHED


class Scheduler:
    """Continuous batching over a paged cache. Which request is in a step with how many tokens, `planner` decides."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises ConfigError where steps are too small for what recurrent states need."""
        assert config.max_num_seqs <= config.max_num_batched_tokens, "every running request must be able to decode"
        drafted = (min(most, config.max_num_seqs) * (1 + drafts) for most, drafts in config.draft_depths)
        assert max(drafted, default=0) <= config.max_num_batched_tokens, "and with drafts, too"
        assert 1 + config.depth * config.max_drafts <= config.max_num_batched_tokens, "what windows keep of a request"
        assert config.scheduling_policy in ("fcfs", "priority") and config.depth >= 1
        if config.num_state_slots:
            assert config.grain > 1, "a prompt's chunk of one token would count as a decode"
            others = config.max_num_seqs - 1
            decoded = max([others, *(min(most, others) * (1 + drafts) for most, drafts in config.draft_depths)])
            least = decoded + config.grain
            if config.max_num_batched_tokens < least:
                raise ConfigError(
                    f"--max-num-batched-tokens {config.max_num_batched_tokens} leaves no room for {config.grain} "
                    f"tokens of a prompt beside {decoded} tokens and drafts of {others} requests that decode, and "
                    f"prompts of a model with recurrent state are cut at multiples of {config.grain}: raise it to "
                    f"{least}, or lower --max-num-seqs"
                )
        self.config = config
        self.kv = KVCacheManager(config)
        self.roster = Roster(config.max_num_seqs, by_priority=config.scheduling_policy == "priority")
        self.in_flight: deque[Step] = deque()
        self.prompt_results = PromptResults()
        self.adapters = AdapterBook(config.max_loras, config.max_cpu_loras) if config.max_loras else None
        if self.adapters is not None:
            self.adapters.busy = self._adapters_in_flight
        self._undelivered: list[RequestOutput] = []  # of requests refused on arrival
        # Beyond this many tokens, the last one's value is needed before the request can go on, if it can at all.
        self.stop = min(config.max_model_len - 1, self.kv.max_tokens)
        self.planner = Planner(config, self.kv, self.roster, self.prompt_results, self.adapters, self.stop)
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

    def _adapters_in_flight(self) -> set[int]:
        return {request.adapter for step in self.in_flight for request in step.scheduled}

    # ---- building a step ----
    def schedule(self) -> StepPlan | None:
        """The next plan; None when there is nothing to compute now: idle, or all wait for results in flight.

        A plan without rows is there to bring the refusals of `add` with its result.
        """
        if len(self.in_flight) >= self.config.depth or not self.has_unfinished():
            return None
        if self.kv.state is not None:
            self.kv.state.settle()
        while True:
            num_preemptions = self.planner.num_preemptions
            step = Step(self.num_scheduled_steps, self.config.max_num_batched_tokens)
            self.planner.fill(step)
            if step.scheduled or self.in_flight or self.planner.num_preemptions == num_preemptions:
                break  # else those whose turn it was had to leave, and no result will come to wake who was left out
        if not step.scheduled and (self.in_flight or not self._undelivered):
            return None
        self.num_scheduled_steps += 1
        self.in_flight.append(step)
        some_have_grammars, drafts = self.roster.num_constrained > 0, self.planner.drafting is not None
        return step.freeze(self.kv, self.prompt_results, some_have_grammars, drafts)

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
        if result.unseen:
            outputs += self._blind(result.unseen)
        if step.scored:
            self.prompt_results.take_scores(step.scored, result)
        for pooled, embedding in zip(step.pooled, result.embeddings, strict=True):
            if pooled and not pooled.finished:
                outputs.append(self._embedded(pooled, embedding))
        if step.num_drafting:
            self._settle(step, result)
        if self.planner.drafting is not None:
            self.planner.drafting.learn(step, result)
        careful = bool(result.errors) or self.roster.num_constrained > 0
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

    def _problem(self, request: Request, token: int, result: StepResult, index: int) -> str:
        """Why this token of the request is none, or "". `index`: of the token in the result."""
        if index in result.errors:
            if result.errors[index] != NOTHING_ALLOWED:
                self._distrust(request)
            return result.errors[index]
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

    def _blind(self, unseen: Mapping[int, str]) -> list[RequestOutput]:
        """The tower has raised for these entries of features: their requests end, and what they cached is worthless."""
        assert self.kv.encoder is not None
        outputs = []
        for number, message in unseen.items():
            keys = self.kv.encoder.lose({number})
            for request in self.roster.find(self.roster.entries):
                if request.media and self.kv.encoder.needs(request, keys):
                    self._distrust(request)
                    outputs.append(self._finish(request, FinishReason.ERROR, error=message))
        return outputs

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
        if self.kv.encoder is not None:
            self.kv.encoder.forgotten += failed.forgotten  # which the device may not have heard of
            keys = self.kv.encoder.lose({encode.entry for encode in failed.encode})
            for request in {request for planned in later for request in planned.scheduled if request.media}:
                if not request.finished and self.kv.encoder.needs(request, keys):
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
            self.planner.requeue(request)

    def _finish(
        self, request: Request, reason: FinishReason, tokens: Sequence[int] = (), logprobs: Logprobs = None,
        error: str = "",
    ) -> RequestOutput:  # fmt: skip
        """The one place where a request ends; what it returns is the last that is said about it."""
        if request.status is RUNNING:
            self.planner.leave(request)
        elif self.adapters is not None:
            self.adapters.leave(request.adapter, request.id)
        self.roster.remove(request)
        self.prompt_results.discard(request)
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
        drafts = self.planner.drafting.counts() if self.planner.drafting else {}
        state = self.kv.state.counts() if self.kv.state is not None else {}
        state |= self.kv.encoder.counts() if self.kv.encoder is not None else {}
        # Who has come since the last plan may find a place in the next one: a burst would be told of a full queue.
        num_waiting = min(self.planner.num_left, len(self.roster.waiting))
        return EngineStats(
            len(self.roster.running), num_waiting, self.config.num_blocks - 1, self.kv.num_free_blocks,
            self.planner.num_preemptions, self.kv.prefix_queries, self.kv.prefix_hits, self.num_steps, self.step_tokens,
            self.prompt_tokens_computed, device_seconds, host_seconds,
            num_corrupted_requests=self.num_corrupted_requests, **drafts, **state,
        )  # fmt: skip

    def check_invariants(self, thorough: bool = False) -> None:
        """Raises InvariantError where the books do not balance, busy or idle. O(requests); `thorough`: O(blocks).

        `assert` would say nothing under `python -O`.
        """
        running = self.roster.running
        self.kv.check_invariants(running, thorough)
        self.roster.check()
        if self.adapters is not None:
            self.adapters.check(Counter(request.adapter for request in running.values() if request.adapter))
        steps = Counter(request for step in self.in_flight for request in step.scheduled)
        samples: Counter[Request] = Counter()
        drafts: Counter[Request] = Counter()
        for step in self.in_flight:
            samples.update(filter(None, step.sampled))
            drafts.update(dict.fromkeys(filter(None, step.sampled[: step.num_drafting]), step.num_drafts))
        for request in running.values():
            computed = request.num_computed_tokens
            pooled = request.sampling.pooling is not None and request.num_in_flight_steps > 0
            require(computed < request.target + pooled, f"{request}: nothing left")
            require(not request.num_in_flight_tokens or computed == request.target - 1, f"{request}: not one behind")
        live = self.roster.find(self.roster.entries)
        require(self.roster.num_constrained == sum(r.grammar is not None for r in live), "grammars miscounted")
        self.prompt_results.check(live)
        for request in live:
            counted = (request.num_in_flight_steps, request.num_in_flight_tokens, request.num_in_flight_drafts)
            in_flight = (steps[request], samples[request] + drafts[request], drafts[request])
            require(counted == in_flight, f"{request}: what is in flight is miscounted")
            pooled = request.sampling.pooling is not None
            require(request.num_tokens <= self.stop + pooled, f"{request}: should have ended")
