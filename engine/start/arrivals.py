"""What the API process asks for becomes requests in the queue: checked, seeded, and once their grammars are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from array import array
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from ..adapters.loading import AdapterLoading
from ..grammar.grammar import Grammars, Matcher
from ..grammar.guide import Guide, ThinkingMatcher
from ..link.messages import (
    AbortRequests,
    AddGrammar,
    AddRequest,
    DropGrammars,
    RequestOutput,
    SetVocabulary,
    unpack_tokens,
)
from ..link.plan import ADAPTER_NOT_LOADED, NO_PROMPT_LOGPROBS
from ..link.sampling_params import SamplingParams, unknown_token_problem
from ..schedule.request import FinishReason, Request, SharedPrompt
from ..schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Arrivals:
    def __init__(
        self, scheduler: Scheduler, vocab_size: int, seed: int, resumed: Callable[[list[RequestOutput]], None]
    ) -> None:
        """`resumed` gets what a request says that waited for its grammar: nothing, or that it has ended."""
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._resumed = resumed
        self._grammars = Grammars()
        self._broken_grammars: dict[str, str] = {}  # why requests that name them must fail
        self.adapters: AdapterLoading | None = None  # where adapters are served
        self._held: dict[int, Request] = {}  # until their grammars are loaded, by id

    def abort(self, message: AbortRequests) -> list[RequestOutput]:
        held = self._held.keys() & message.ids
        ids = [id for id in message.ids if id not in held]
        if message.unless_begun and self._scheduler.has_begun(ids):
            return []
        for id in held:
            del self._held[id]
        return [RequestOutput(id, [], FinishReason.ABORT) for id in held] + self._scheduler.abort(ids)

    def add(self, message: AddRequest) -> Iterator[list[RequestOutput]]:
        """Queues the requests of a message one by one; what it yields are the outputs of those that end at once."""
        ids = range(message.id, message.id + message.n)
        try:
            prompt = SharedPrompt(unpack_tokens(message.prompt))
            error = self._problem(prompt.token_ids, message.sampling) or self._scheduler.kv.media_problem(
                prompt.token_ids, message.media
            )
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is not None:
            yield [_failed(id, error) for id in ids]
            return
        for choice, id in enumerate(ids):
            request = Request(
                id, prompt, message.sampling.of_choice(choice),
                priority=message.priority, cache_salt=message.cache_salt, arrival=message.arrival,
                tenant=message.tenant, media=message.media,
            )  # fmt: skip
            yield self._queue(request)

    def _queue(self, request: Request) -> list[RequestOutput]:
        sampling, matcher = request.sampling, None
        if (error := self._adapter_problem(sampling)) is not None:  # it may have been unloaded during a wait
            return [_failed(request.id, error)]
        if sampling.grammar is not None:
            try:
                matcher = self._grammars.matcher(sampling.grammar)
                if not matcher.ready:
                    self._hold(request, matcher)
                    return []
            except Exception as failure:
                reason = "the engine was not told of it" if isinstance(failure, KeyError) else str(failure)
                reason = self._broken_grammars.get(sampling.grammar, reason)
                return [_failed(request.id, f"the grammar of this request cannot be used: {reason}")]
        if sampling.thinking is not None:
            matcher = ThinkingMatcher(
                sampling.thinking, matcher, [token for token in sampling.eos_token_ids if token < self._vocab_size]
            )
        request.grammar = Guide(matcher, self._vocab_size) if matcher is not None else None
        if sampling.seed is None and sampling.temperature > 0:
            request.sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(63))
        try:
            self._scheduler.add(request)
        except Exception as failure:  # nobody else's: it is not in the queue yet
            logger.error("request %d cannot be scheduled", request.id, exc_info=failure)
            return [_failed(request.id, f"{type(failure).__name__}: {failure}")]
        return []

    def _hold(self, request: Request, matcher: Matcher) -> None:
        """Nobody waits for the loading of a grammar but who needs it."""
        loop = asyncio.get_running_loop()

        def resume() -> None:
            # At once, not by way of the inbox: an abort that is already waiting there has to find the request.
            if self._held.pop(request.id, None):
                self._resumed(self._queue(request))

        def loaded() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(resume)

        self._held[request.id] = request
        matcher.when_ready(loaded)

    def _problem(self, token_ids: array[int], sampling: SamplingParams) -> str | None:
        """The front end has checked all of this; a request that slips through must not take the engine with it."""
        config = self._scheduler.config
        length, limit = len(token_ids), config.max_model_len - (sampling.pooling is None)
        if not 0 < length <= limit:
            return f"the prompt has {length} tokens: at least 1 and at most {limit} fit this engine"
        if not config.enable_chunked_prefill and length > config.max_num_batched_tokens:
            return (
                f"the prompt has {length} tokens and chunked prefill is off: at most "
                f"max_num_batched_tokens={config.max_num_batched_tokens} fit one step"
            )
        if np.asarray(token_ids, np.int32).view(np.uint32).max() >= self._vocab_size:
            return unknown_token_problem(token_ids.tolist(), self._vocab_size)  # reading there would cost a GPU
        return sampling.problem(self._vocab_size)

    def _adapter_problem(self, sampling: SamplingParams) -> str | None:
        if not (id := sampling.adapter):
            return None
        if self.adapters is None or not self.adapters.knows(id):
            return ADAPTER_NOT_LOADED
        if sampling.prompt_logprobs is not None and id in self.adapters.with_head:
            return NO_PROMPT_LOGPROBS
        return None

    def change_grammars(self, message: SetVocabulary | AddGrammar | DropGrammars) -> None:
        """What goes wrong here is told to the requests that name the grammar."""
        try:
            if isinstance(message, SetVocabulary):
                self._grammars.set_vocabulary(message)
            elif isinstance(message, AddGrammar):
                self._broken_grammars.pop(message.key, None)
                self._grammars.add(message)
            else:
                for key in message.keys:
                    self._broken_grammars.pop(key, None)
                self._grammars.drop(message.keys)
        except Exception as error:
            logger.warning("%s failed", type(message).__name__, exc_info=error)
            if isinstance(message, AddGrammar):
                self._broken_grammars[message.key] = f"{type(error).__name__}: {error}"


def _failed(id: int, error: str) -> RequestOutput:
    return RequestOutput(id, [], FinishReason.ERROR, error=error)
