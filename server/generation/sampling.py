"""A validated request to the engine's SamplingParams: defaults filled in, everything checked against the model."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ...engine.link.messages import EngineInfo
from ...engine.link.sampling_params import SamplingParams, unknown_token
from ..errors import bad_request, context_length_exceeded, unsupported
from ..text.model import TextModel
from ..text.tokenizer import Tokenizer
from ..wire.pooled import PooledRequest
from ..wire.requests import MAX_CHOICES, ChatRequest, CompletionRequest
from .choice import Prompt, Repetition, TextOptions

MAX_SCORES = 1 << 20  # log-probabilities of a request's prompts: some 60 MB of JSON
DEFAULT_LOGPROBS = 20  # of --max-logprobs: up to these any prompt may have


def resolve(
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
    model: TextModel,
    info: EngineInfo,
    default_max_tokens: int | None,
) -> list[Prompt]:
    """Raises ApiError (400) for what this model or engine cannot do.

    `default_max_tokens`: where the request sets none; None = what is left of the context.
    """
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    if model.tokenizer.missing:
        refuse_text(request)
    base = _sampling(request, model, info)
    if (request.n or 1) * len(prompts) > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts times n {request.n} is more than {MAX_CHOICES} choices.", "n")
    name, asked = request.token_limit
    is_text = isinstance(request, ChatRequest) or isinstance(request.prompt[0], str)
    resolved = []
    for token_ids in prompts:
        if not token_ids:
            raise bad_request(f"'{field}' gives no tokens.", field)
        ids = prompt_ids(field, token_ids, is_text, model.tokenizer, info)
        ids = truncated(request, ids, info, asked or default_max_tokens or 1)
        left = info.max_model_len - len(ids)
        if left < 1:
            raise context_length_exceeded(info.max_model_len, len(ids), asked, field)
        if asked is not None and asked > left:
            raise context_length_exceeded(info.max_model_len, len(ids), asked, name)
        limit = min(asked or default_max_tokens or left, left, model.max_new_tokens or left)
        if base.min_tokens > limit:
            raise bad_request(f"'min_tokens' is {base.min_tokens}, above the limit of {limit} tokens.", "min_tokens")
        resolved.append(Prompt(ids, msgspec.structs.replace(base, max_tokens=limit)))
    check_scores(sum(len(prompt.token_ids) for prompt in resolved), base.prompt_logprobs, info)
    return resolved


def check_scores(num_tokens: int, asked: int | None, info: EngineInfo) -> None:
    """`num_tokens`: of all prompts; `asked`: log-probabilities of each. Raises ApiError (400) where a step would hold
    up everybody else to list them.
    """
    most = max(MAX_SCORES, DEFAULT_LOGPROBS * info.max_model_len)
    if asked is not None and asked > DEFAULT_LOGPROBS and num_tokens * asked > most:
        raise bad_request(
            f"'prompt_logprobs' of {asked} tokens at {num_tokens} places are {num_tokens * asked} log-probabilities; "
            f"at most {most} are allowed: shorten the prompt or ask for fewer.",
            "prompt_logprobs",
        )


def resolving_size(request: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]) -> int:
    """About how many characters of text are tokenised in the time that `resolve` takes."""
    size = sum(map(len, prompts)) >> 6  # ids, to be looked up in the vocabulary
    if request.bad_words:
        size += 2 * sum(map(len, request.bad_words))
    if request.allowed_token_ids:
        size += len(request.allowed_token_ids) >> 3
    return size


def described(
    request: ChatRequest | CompletionRequest,
    num_tokens: int,
    model: TextModel,
    info: EngineInfo,
    default_max_tokens: int | None,
) -> dict[str, Any]:
    """vLLM's sampling_params of a prompt of `num_tokens`. Raises ApiError (400) as `resolve` does."""
    base = _sampling(request, model, info)
    left = max(0, info.max_model_len - num_tokens)
    limit = min(request.token_limit[1] or default_max_tokens or left, left, model.max_new_tokens or left)
    same = (
        "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
        "min_tokens", "logprobs", "prompt_logprobs",
    )  # fmt: skip
    # The number of named tokens is no number of likeliest ones: as the request says it.
    more = {"logprobs": 0, "logprob_token_ids": request.logprob_token_ids} if request.logprob_token_ids else {}
    return {
        "n": request.n or 1,
        **{name: getattr(base, name) for name in same},
        "max_tokens": limit,
        "stop": request.stop or [],
        "stop_token_ids": request.stop_token_ids or [],
        "ignore_eos": bool(request.ignore_eos),
        "bad_words": request.bad_words or [],
        "allowed_token_ids": request.allowed_token_ids,
        "logit_bias": request.logit_bias,
        "include_stop_str_in_output": bool(request.include_stop_str_in_output),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "spaces_between_special_tokens": request.spaces_between_special_tokens is not False,
        **more,
    }


def text_options(request: ChatRequest | CompletionRequest) -> TextOptions:
    watch = request.repetition_detection
    repetition = None
    if watch is not None and watch.max_pattern_size:
        repetition = Repetition(max(1, watch.min_pattern_size), watch.max_pattern_size, watch.min_count)
    return TextOptions(
        stops=request.stop or (),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        repetition=repetition,
        prompt_only=request.prompt_only,
    )


def answer_in_ids(request: ChatRequest | CompletionRequest) -> TextOptions:
    """Where there is no tokenizer."""
    request.return_token_ids = request.return_tokens_as_token_ids = True
    return replace(text_options(request), detokenize=False)


def refuse_text(request: ChatRequest | CompletionRequest) -> None:
    """Raises ApiError (400) for what nobody can follow without a tokenizer."""
    constraint = request.constraint[0] if request.constraint else ""
    for name, value in (("stop", request.stop), ("bad_words", request.bad_words), (constraint, constraint)):
        if value:
            remedy = "; use 'stop_token_ids'" if name == "stop" else ""
            raise bad_request(f"'{name}' needs a tokenizer, and this server has none{remedy}.", name, "no_tokenizer")


def truncated(
    request: ChatRequest | CompletionRequest | PooledRequest, token_ids: array[int], info: EngineInfo, room: int
) -> array[int]:
    """The prompt's last tokens, or its first ones, as many as the request keeps. `room`: tokens to leave for the
    answer. Raises ApiError (400).
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    name, limit = "truncate_prompt_tokens", info.max_model_len
    if keep > limit:
        raise bad_request(f"'{name}' is {keep}; the model's context holds {limit} tokens.", name)
    if keep == -1:
        keep = limit - room
        if keep < 1:
            raise context_length_exceeded(limit, len(token_ids), room, name)
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]


def _sampling(request: ChatRequest | CompletionRequest, model: TextModel, info: EngineInfo) -> SamplingParams:
    """All but max_tokens, which depends on the prompt."""

    def value(name: str, neutral: float) -> float:
        given = getattr(request, name)
        return given if given is not None else model.defaults.get(name, neutral)

    temperature = value("temperature", 1.0)
    if temperature > 0:
        temperature = max(temperature, 0.01)  # below, logits divided by it overflow
    top_k = int(value("top_k", 0))
    named = tuple(request.logprob_token_ids or ())
    top = "logprob_token_ids" if named else "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    for name, asked in (
        (top, request.num_logprobs),
        ("prompt_logprobs", info.vocab_size if request.prompt_logprobs == -1 else request.prompt_logprobs),
    ):
        most = info.vocab_size if info.max_logprobs == -1 else info.max_logprobs
        if asked is not None and asked > most:
            whole = " (-1: the whole vocabulary)" if request.prompt_logprobs == -1 else ""
            raise bad_request(f"'{name}' is {asked}{whole}; this server allows at most {most}.", name)
    stop_token_ids = tuple(request.stop_token_ids or ())
    for name, ids in (
        ("stop_token_ids", stop_token_ids),
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids),
        ("logprob_token_ids", named),
    ):
        if ids:
            check_tokens(name, ids, info)
    allowed = tuple(dict.fromkeys(request.allowed_token_ids)) if request.allowed_token_ids else None
    if allowed and request.min_tokens and set(allowed) <= {*model.eos_token_ids, *stop_token_ids}:
        raise bad_request(
            "'min_tokens' forbids to end at once, and 'allowed_token_ids' allows nothing else.", "allowed_token_ids"
        )
    if request.priority and info.scheduling_policy != "priority":
        raise unsupported("priority", "'priority' (without --scheduling-policy priority)")
    return SamplingParams(
        max_tokens=1,
        min_tokens=request.min_tokens or 0,
        temperature=temperature,
        top_k=top_k if 0 < top_k < info.vocab_size else 0,
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        # far beyond any use, and safe to divide by in float32
        repetition_penalty=min(max(value("repetition_penalty", 1.0), 1e-6), 1e6),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        logit_bias=request.logit_bias or None,
        stop_token_ids=stop_token_ids,
        eos_token_ids=model.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=None if request.prompt_only else request.num_logprobs,
        logprob_token_ids=() if request.prompt_only else named,
        prompt_logprobs=info.vocab_size if request.num_prompt_logprobs == -1 else request.num_prompt_logprobs,
        allowed_token_ids=allowed,
        bad_words=_bad_words(request.bad_words, model.tokenizer) if request.bad_words else (),
    )


def prompt_ids(
    name: str, token_ids: Sequence[int], is_text: bool, tokenizer: Tokenizer, info: EngineInfo
) -> array[int]:
    """As int32: so they travel from here to the device. A client's own are looked up in the vocabulary; those of a text
    (`is_text`) are in it. Raises ApiError (400).
    """
    if not is_text or tokenizer.largest_id >= info.vocab_size:
        check_tokens(name, token_ids, info)
    return array("i", token_ids)


def check_tokens(name: str, token_ids: Collection[int], info: EngineInfo) -> None:
    """Raises ApiError (400) for ids that the model does not have."""
    if (bad := unknown_token(token_ids, info.vocab_size)) is not None:
        raise bad_request(f"'{name}' has the token id {bad}; the vocabulary ends at {info.vocab_size - 1}.", name)


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it stands at the beginning of a text and as it stands after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word, False))
        spaced = tuple(tokenizer.encode(f" {stripped}", False)) if (stripped := word.lstrip()) else plain
        if not plain:
            raise bad_request(f"'bad_words' has {word!r}, which gives no tokens.", "bad_words")
        sequences[plain] = None
        # Where the space is a token of its own, the word after it is the plain one.
        if spaced[-len(plain) :] != plain:
            sequences[spaced] = None
    return tuple(sequences)
