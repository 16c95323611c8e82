"""What a request asks for, and what the engine knows of it while it lives."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

if TYPE_CHECKING:
    from .guide import Guide
    from .plan import TokenLogprobs

MAX_FLOAT = 3e38  # what the device's float32 holds
MAX_SEED = 2**63 - 1


def unknown_token(token_ids: Collection[int], vocab_size: int) -> int | None:
    """The first of these ids that the vocabulary does not have."""
    try:
        msgspec.convert(token_ids, _known(vocab_size))  # one pass in C, in most cases the only one
    except msgspec.ValidationError:
        return next((token for token in token_ids if not 0 <= token < vocab_size), None)
    return None


def unknown_token_problem(token_ids: Collection[int], vocab_size: int) -> str:
    token = unknown_token(token_ids, vocab_size)
    return f"the prompt has the token id {token}; the vocabulary ends at {vocab_size - 1}"


@cache
def _known(vocab_size: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """Of a model that reasons before it answers. A grammar applies to the answer alone."""

    begin: int  # the token that opens the reasoning, as an output's first; -1: none
    end: tuple[int, ...]  # the tokens that close it
    open: bool  # the prompt has opened it
    budget: int | None = None  # tokens of reasoning, after which it is closed


LAST, MEAN, CLS, ALL = "last", "mean", "cls", "all"
POOLINGS = (LAST, MEAN, CLS)  # into one vector


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """How the hidden states of a prompt become one vector, or one a token."""

    kind: str = LAST  # that of the last token, the mean of all tokens', that of the first token, or all of them
    normalize: bool = True  # to length 1; of all tokens', their numbers together
    dimensions: int | None = None  # only so many of the leading ones; None = all
    head: bool = False  # they go through the model's head, where it has one, before any of that
    second: int = 0  # of a pair of texts, the first token of the second one, for models that tell them apart; 0: none


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, in token ids only: strings and defaults were resolved before the engine sees this."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None = the engine draws one
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off, 0 = of the sampled token, k = and of the k most likely
    prompt_logprobs: int | None = None  # the same of the prompt's tokens; the prefix cache is then not read
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    grammar: str | None = None  # key of an AddGrammar message that came before
    pooling: Pooling | None = None  # nothing is sampled: the answer is a vector made of the prompt
    adapter: int = 0  # id of a LoadAdapter message that came before; 0: the model as it is
    thinking: Thinking | None = None  # where reasoning comes before what the grammar says, or has a budget

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def of_choice(self, choice: int) -> SamplingParams:
        """Of several answers to one prompt. With a seed they differ, and are the same ones each time. What the engine
        says of the prompt, it says once."""
        sampling = self
        if choice and sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & MAX_SEED)
        if choice and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return sampling

    def problem(self, vocab_size: int) -> str | None:
        """Why no engine could sample like this, which would take a whole step with it (or the GPU); None: it can."""
        if self.max_tokens < 1:
            return f"max_tokens is {self.max_tokens}: it must be at least 1"
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not -MAX_FLOAT <= (value := getattr(self, name)) <= MAX_FLOAT:
                return f"{name} is {value}: it must be a finite number"
        if not 0 <= self.min_p <= 1:
            return f"min_p is {self.min_p}: it must be at least 0 and at most 1"
        if self.repetition_penalty <= 0:
            return f"repetition_penalty is {self.repetition_penalty}: it must be above 0"
        if not -(1 << 31) <= self.top_k < 1 << 31:
            return f"top_k is {self.top_k}: it must be at most {(1 << 31) - 1}"
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            return f"seed is {self.seed}: it must fit 64 bits"
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= vocab_size:
                return f"{name} is {count}: it must be at least 0 and at most {vocab_size}, the size of the vocabulary"
        if self.pooling is not None and (problem := self._pooling_problem(self.pooling)):
            return problem
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            return "allowed_token_ids is empty: it must name at least one token"
        if self.thinking is not None and not self.thinking.end:
            return "thinking.end is empty: it must have a token"
        ids: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": chain.from_iterable(self.bad_words),
            "thinking": () if self.thinking is None else (max(self.thinking.begin, 0), *self.thinking.end),
        }
        for name, tokens in ids.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    return f"{name} has the token id {token}; the vocabulary ends at {vocab_size - 1}"
        return None

    def _pooling_problem(self, pooling: Pooling) -> str | None:
        if pooling.kind not in (*POOLINGS, ALL):
            return f"pooling is {pooling.kind!r}: choose one of {', '.join(POOLINGS)}, {ALL}"
        if pooling.dimensions is not None and pooling.dimensions < 1:
            return f"dimensions is {pooling.dimensions}: it must be at least 1"
        if self.prompt_logprobs is not None or self.grammar is not None:
            return "an embedding has neither prompt_logprobs nor a grammar: leave them out"
        return None


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
