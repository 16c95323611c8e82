"""A request, and what the engine knows of it while it lives."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field

from ..grammar.guide import Guide
from ..link.media import MediaItem
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


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt that several requests wait with: tokens and hashes are theirs in common, until one starts and has its
    own. Nothing changes them but KVCacheManager.extend_hashes, which hashes the prompt for the first of them."""

    token_ids: array[int]
    block_hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence of tokens. A step gives it some tokens so that `num_computed_tokens` catches up with `target`."""

    id: int
    prompt: InitVar[Sequence[int] | SharedPrompt]
    sampling: SamplingParams
    _: KW_ONLY
    priority: int = 0
    cache_salt: str | None = None
    arrival: float = 0.0
    tenant: int = 0  # among whom the queue is shared
    media: tuple[MediaItem, ...] = ()  # the pictures of its prompt, in their order
    grammar: Guide | None = None  # has accepted the outputs in `token_ids`
    token_ids: array[int] = field(init=False)  # the prompt, then every output whose value has reached the host
    block_hashes: list[bytes] = field(init=False)  # of its full blocks, chained
    shares_prompt: bool = field(init=False)  # until it starts
    num_prompt_tokens: int = field(init=False)
    ends: tuple[int, ...] = field(init=False)  # tokens that end it, from min_tokens on
    longest: int = field(init=False)  # tokens with which it ends at last
    media_end: int = field(init=False)  # tokens up to the end of its last picture; 0: it has none
    # Of prompt tokens 1 …, as they arrive; None where nobody asked, or once they have been sent.
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False)
    first_scheduled: float | None = None  # time.monotonic()
    last_sampled: int = -1  # index of the plan that has its newest sample
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id; None for EOS
    row: int | None = None  # of the device tables, for as long as it runs
    slot: int = -1  # of its adapter, for as long as it runs
    # Advanced when a step is scheduled, not when its result arrives. With drafts in flight it is an upper bound, as is
    # the number of tokens in flight: how many of the drafts hold, the device knows.
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0  # sampled on the device, value not yet on the host
    num_in_flight_drafts: int = 0  # of them, those that may turn out wrong
    num_in_flight_steps: int = 0  # scheduled steps that contain it and have not returned
    num_cached_tokens: int | None = None  # prefix hit of its first admission
    num_preemptions: int = 0

    def __post_init__(self, prompt: Sequence[int] | SharedPrompt) -> None:
        self.shares_prompt = isinstance(prompt, SharedPrompt)
        if isinstance(prompt, SharedPrompt):
            self.token_ids, self.block_hashes = prompt.token_ids, prompt.block_hashes
        else:
            self.token_ids, self.block_hashes = array("i", prompt), []
        self.num_prompt_tokens, sampling = len(self.token_ids), self.sampling
        self.ends = sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)
        self.longest = self.num_prompt_tokens + sampling.max_tokens
        self.media_end = self.media[-1].start + self.media[-1].length if self.media else 0
        self.prompt_logprobs = None if sampling.prompt_logprobs is None else []

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
