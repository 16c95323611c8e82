"""What an answer may weigh that is kept until it is whole: a small request can ask for more than a machine has."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.link.messages import EngineInfo
from ...engine.link.sampling_params import ALL
from ..errors import bad_request
from ..wire.pooled import MAX_INPUTS
from .choice import Prompt
from .sampling import DEFAULT_LOGPROBS

# Bytes of the process that puts an answer together, measured: of a token its text and its id, of a log-probability the
# engine's entry, what JSON is made of, and the JSON; of a prompt, rows become JSON one by one.
TOKEN, ENTRY, PROMPT_ENTRY = 128, 384, 192
# Of a vector and what is beside it; of each of its numbers float32 and JSON, or where none of them is told float32.
VECTOR, NUMBER, UNTOLD = 512, 48, 8
LEAST = 256 << 20  # bytes that one answer may weigh, where no limit is set


def most_bytes(limit: int | None, info: EngineInfo) -> int:
    """Of one answer, `limit` as --max-answer-bytes has it; 0: no limit. Without one, a single choice may fill the
    context, with as many log-probabilities as any request may have."""
    return max(LEAST, info.max_model_len * bytes_per_token(DEFAULT_LOGPROBS)) if limit is None else limit


def bytes_per_token(num_logprobs: int | None, entry: int = ENTRY) -> int:
    """`num_logprobs`: beside that of the token itself; None: not even that."""
    return TOKEN + (0 if num_logprobs is None else entry * (1 + num_logprobs))


def check_vectors(
    prompts: Sequence[Prompt], limit: int | None, info: EngineInfo, param: str, bytes_per_number: int = NUMBER
) -> None:
    """The same of an answer in vectors, or in one a token. Without `limit`, as many inputs as one request may have fit.
    Raises ApiError (400), naming `param`."""
    found = sum(num_numbers(prompt, info) for prompt in prompts)
    weight = len(prompts) * VECTOR + found * bytes_per_number
    usual = MAX_INPUTS * (VECTOR + info.hidden_size * NUMBER)
    most = max(most_bytes(None, info), usual) if limit is None else limit
    if most and weight > most:
        raise bad_request(
            f"The answer may weigh {weight} bytes: {len(prompts)} vectors with {found} numbers in all; this server "
            f"keeps {most} for one answer (--max-answer-bytes): send fewer inputs at a time.",
            param,
            "answer_too_large",
        )


def num_numbers(prompt: Prompt, info: EngineInfo) -> int:
    """That the engine says of a prompt instead of text."""
    pooling = prompt.sampling.pooling
    assert pooling is not None, "nothing is generated"
    width = len(info.labels) if pooling.head and info.labels else info.hidden_size
    return (pooling.dimensions or width) * (len(prompt.token_ids) if pooling.kind == ALL else 1)


def check_weight(
    prompts: Sequence[Prompt], n: int, most: int, *, keeps_answer: bool, repeats_prompt: bool, param: str
) -> None:
    """Of `n` choices of each prompt. `keeps_answer`: it is not streamed, or stored as well; `repeats_prompt`: each
    choice has the tokens of its prompt. What is said of a prompt is kept in any case. Raises ApiError (400), naming
    `param`.
    """
    weight = num_tokens = 0
    for prompt in prompts:
        sampling, length = prompt.sampling, len(prompt.token_ids)
        if repeats_prompt:
            weight += n * length * bytes_per_token(sampling.prompt_logprobs)
        elif sampling.prompt_logprobs is not None:
            weight += length * bytes_per_token(sampling.prompt_logprobs, PROMPT_ENTRY)
        if keeps_answer:
            num_tokens += n * sampling.max_tokens
            weight += n * sampling.max_tokens * bytes_per_token(sampling.logprobs)
    if most and weight > most:
        at_most = f"{num_tokens} tokens at most, " if num_tokens else ""
        remedy = "stream it without storing it, or " if keeps_answer else ""
        raise bad_request(
            f"The answer may weigh {weight} bytes: {len(prompts) * n} choices, {at_most}with the log-probabilities "
            f"that were asked for; this server keeps {most} for one answer (--max-answer-bytes): {remedy}ask for "
            "fewer choices, tokens or log-probabilities at a time.",
            param,
            "answer_too_large",
        )
