"""A request, and what the engine knows of it while it lives."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

from ..grammar.guide import Guide
from ..link.plan import TokenLogprobs
from ..link.sampling_params import SamplingParams

LIKELY_ANSWER = 256  # tokens, where a request may have as many: few ask for what they get


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SharedPrompt:
    """A prompt that several requests wait with: tokens and hashes are theirs in common, until one starts and has its
    own. Nothing changes them but KVCacheManager.extend_hashes, which hashes the prompt for the first of them."""

    __slots__ = ("block_hashes", "token_ids")

    def __init__(self, token_ids: array[int]) -> None:
        self.token_ids = token_ids
        self.block_hashes: list[bytes] = []


class Request:
    """One sequence of tokens. A step gives it some tokens so that `num_computed_tokens` catches up with `target`."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "cache_salt",
        "ends",
        "finish_reason",
        "first_scheduled",
        "grammar",
        "id",
        "last_sampled",
        "longest",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_drafts",
        "num_in_flight_steps",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "prompt_logprobs",
        "row",
        "sampling",
        "shares_prompt",
        "slot",
        "status",
        "stop_reason",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        id: int,
        prompt: Sequence[int] | SharedPrompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival: float = 0.0,
        tenant: int = 0,
        grammar: Guide | None = None,
    ) -> None:
        self.id = id
        self.shares_prompt = isinstance(prompt, SharedPrompt)  # until it starts
        if isinstance(prompt, SharedPrompt):
            self.token_ids, self.block_hashes = prompt.token_ids, prompt.block_hashes
        else:
            self.token_ids = array("i", prompt)  # the prompt, then every output whose value has reached the host
            self.block_hashes = []  # of its full blocks, chained
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling = sampling
        # Tokens that end it, from min_tokens on.
        self.ends = sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival = arrival
        self.tenant = tenant  # among whom the queue is shared
        self.first_scheduled: float | None = None  # time.monotonic()
        self.last_sampled = -1  # index of the plan that has its newest sample
        self.longest = self.num_prompt_tokens + sampling.max_tokens  # tokens with which it ends at last
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None  # the stop token id; None for EOS
        self.row: int | None = None  # of the device tables, for as long as it runs
        self.slot = -1  # of its adapter, for as long as it runs
        # Advanced when a step is scheduled, not when its result arrives. With drafts in flight it is an upper bound, as
        # is the number of tokens in flight: how many of the drafts hold, the device knows.
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0  # sampled on the device, value not yet on the host
        self.num_in_flight_drafts = 0  # of them, those that may turn out wrong
        self.num_in_flight_steps = 0  # scheduled steps that contain it and have not returned
        self.num_cached_tokens: int | None = None  # prefix hit of its first admission
        self.num_preemptions = 0
        self.grammar = grammar  # has accepted the outputs in `token_ids`
        # Of prompt tokens 1 …, as they arrive; None where nobody asked, or once they have been sent.
        self.prompt_logprobs: list[TokenLogprobs] | None = None if sampling.prompt_logprobs is None else []

    def own_prompt(self) -> None:
        """From now on its tokens and hashes are its own."""
        if self.shares_prompt:
            self.token_ids, self.block_hashes = self.token_ids[:], self.block_hashes.copy()
            self.shares_prompt = False

    @property
    def adapter(self) -> int:
        """Its id; 0: none."""
        return self.sampling.adapter

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def target(self) -> int:
        """Tokens that exist, counting those whose value is still on the device; with drafts, at most."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def cost(self) -> int:
        """Tokens that its tenant is charged when it starts: for the first time."""
        return 0 if self.first_scheduled is not None else self.num_prompt_tokens + self._likely_answer

    @property
    def overrun(self) -> int:
        """Tokens of its answer beyond those that were charged, or below 0."""
        return 0 if self.first_scheduled is None else self.num_output_tokens - self._likely_answer

    @property
    def _likely_answer(self) -> int:
        return min(self.sampling.max_tokens, LIKELY_ANSWER)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, {self.status.name}, tokens={self.num_tokens}+{self.num_in_flight_tokens}, "
            f"computed={self.num_computed_tokens})"
        )


def ending(request: Request, token: int) -> FinishReason | None:
    """Why a request ends with the token that has just been appended; None: it does not."""
    sampling = request.sampling
    if token in request.ends and request.num_output_tokens >= sampling.min_tokens:
        if sampling.ignore_eos or token not in sampling.eos_token_ids:
            request.stop_reason = token
        return FinishReason.STOP
    if request.grammar is not None and request.grammar.terminated:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.num_tokens >= request.longest else None
