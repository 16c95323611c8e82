"""What a request asks for: how to choose tokens, or how to make a vector of its prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from itertools import chain
from typing import Annotated, Any

import msgspec

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
    logprob_token_ids: tuple[int, ...] = ()  # of these, `logprobs` many, in the place of the most likely ones
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
        if len(self.logprob_token_ids) > (self.logprobs or 0):
            return f"logprob_token_ids has {len(self.logprob_token_ids)} ids, and logprobs is {self.logprobs}"
        if self.pooling is not None and (problem := self._pooling_problem(self.pooling)):
            return problem
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            return "allowed_token_ids is empty: it must name at least one token"
        if self.thinking is not None and not self.thinking.end:
            return "thinking.end is empty: it must have a token"
        ids: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids,
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
