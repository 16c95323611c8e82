"""A validated request to the engine's SamplingParams: defaults filled in, everything checked against the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ..engine.messages import EngineInfo
from ..engine.request import SamplingParams, unknown_token
from .choice import Prompt, Repetition, TextOptions
from .errors import bad_request, context_length_exceeded, unsupported
from .protocol import MAX_CHOICES, ChatRequest, CompletionRequest
from .tokenizer import TextModel, Tokenizer


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
    base = _sampling(request, model, info)
    if (request.n or 1) * len(prompts) > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts times n {request.n} is more than {MAX_CHOICES} choices.", "n")
    name, asked = request.token_limit
    resolved = []
    for token_ids in prompts:
        if not token_ids:
            raise bad_request(f"'{field}' gives no tokens.", field)
        check_tokens(field, token_ids, info)
        token_ids = truncated(request.truncate_prompt_tokens, token_ids, info, asked or default_max_tokens or 1)
        left = info.max_model_len - len(token_ids)
        if left < 1:
            raise context_length_exceeded(info.max_model_len, len(token_ids), asked, field)
        if asked is not None and asked > left:
            raise context_length_exceeded(info.max_model_len, len(token_ids), asked, name)
        limit = min(asked or default_max_tokens or left, left, model.max_new_tokens or left)
        if base.min_tokens > limit:
            raise bad_request(f"'min_tokens' is {base.min_tokens}, above the limit of {limit} tokens.", "min_tokens")
        resolved.append(Prompt(token_ids, msgspec.structs.replace(base, max_tokens=limit)))
    return resolved


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


def truncated(keep: int | None, token_ids: list[int], info: EngineInfo, room: int) -> list[int]:
    """The prompt's last tokens, as many as `keep`, a request's truncate_prompt_tokens, says. `room`: tokens to leave
    for the answer. Raises ApiError (400).
    """
    if keep is None:
        return token_ids
    name, limit = "truncate_prompt_tokens", info.max_model_len
    if keep > limit:
        raise bad_request(f"'{name}' is {keep}; the model's context holds {limit} tokens.", name)
    if keep == -1:
        keep = limit - room
        if keep < 1:
            raise context_length_exceeded(limit, len(token_ids), room, name)
    return token_ids[-keep:]


def _sampling(request: ChatRequest | CompletionRequest, model: TextModel, info: EngineInfo) -> SamplingParams:
    """All but max_tokens, which depends on the prompt."""

    def value(name: str, neutral: float) -> float:
        given = getattr(request, name)
        return given if given is not None else model.defaults.get(name, neutral)

    temperature = value("temperature", 1.0)
    if temperature > 0:
        temperature = max(temperature, 0.01)  # below, logits divided by it overflow
    elif (request.n or 1) > 1:
        raise bad_request(f"'n' must be 1 when 'temperature' is 0, but it is {request.n}.", "n")
    top_k = int(value("top_k", 0))
    for name, asked in (
        ("top_logprobs" if isinstance(request, ChatRequest) else "logprobs", request.num_logprobs),
        ("prompt_logprobs", request.prompt_logprobs),
    ):
        if asked is not None and asked > info.max_logprobs:
            raise bad_request(f"'{name}' is {asked}; this server allows at most {info.max_logprobs}.", name)
    stop_token_ids = tuple(request.stop_token_ids or ())
    for name, ids in (
        ("stop_token_ids", stop_token_ids),
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids),
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
        prompt_logprobs=request.num_prompt_logprobs,
        allowed_token_ids=allowed,
        bad_words=_bad_words(request.bad_words, model.tokenizer) if request.bad_words else (),
    )


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
