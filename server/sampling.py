"""A validated request to the engine's SamplingParams: defaults filled in, everything checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..engine.messages import EngineInfo
from ..engine.request import SamplingParams
from .errors import bad_request, context_length_exceeded, unsupported
from .protocol import MAX_CHOICES, MAX_SEED, ChatRequest, CompletionRequest
from .tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine; each of its n choices becomes one engine request."""

    token_ids: list[int]
    sampling: SamplingParams

    def sampling_of(self, choice: int) -> SamplingParams:
        """A seeded request gives n different choices, the same ones each time."""
        if choice == 0 or self.sampling.seed is None:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + choice) & MAX_SEED)


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
        if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
            bad = next(token for token in token_ids if not 0 <= token < info.vocab_size)
            raise bad_request(f"'{field}' has the token id {bad}; the vocabulary ends at {info.vocab_size - 1}.", field)
        left = info.max_model_len - len(token_ids)
        if left < 1:
            raise context_length_exceeded(info.max_model_len, len(token_ids), asked, field)
        if asked is not None and asked > left:
            raise context_length_exceeded(info.max_model_len, len(token_ids), asked, name)
        limit = asked or min(left, default_max_tokens or left)
        if base.min_tokens > limit:
            raise bad_request(f"'min_tokens' is {base.min_tokens}, above the limit of {limit} tokens.", "min_tokens")
        resolved.append(Prompt(token_ids, msgspec.structs.replace(base, max_tokens=limit)))
    return resolved


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
    num_logprobs = request.num_logprobs
    if num_logprobs is not None and num_logprobs > info.max_logprobs:
        name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        raise bad_request(f"'{name}' is {num_logprobs}; this server allows at most {info.max_logprobs}.", name)
    for name, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
        for token in ids or ():
            if not 0 <= token < info.vocab_size:
                raise bad_request(
                    f"'{name}' has the token id {token}; the vocabulary ends at {info.vocab_size - 1}.", name
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
        stop_token_ids=tuple(request.stop_token_ids or ()),
        eos_token_ids=model.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=num_logprobs,
    )
