"""Log-probabilities as chat and as completions write them, of the output and of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...engine.link.plan import TokenLogprobs
from ..text.tokenizer import Tokenizer
from ..wire.requests import ChatRequest, CompletionRequest
from .choice import Delta, Prompt, TextOptions

LOWEST = -9999.0  # instead of minus infinity, which JSON does not have

PromptLogprobs = list[dict[int, dict[str, Any]] | None]


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """How a request wants them: the `num_top` likeliest tokens at each place, tokens by name or as token_id:7."""

    num_top: int
    as_ids: bool = False
    named: bool = False  # they are tokens that the request names: none is the first or second likeliest

    @staticmethod
    def of(request: ChatRequest | CompletionRequest) -> LogprobFormat | None:
        """None: no log-probabilities of the output were asked for."""
        num_top = request.num_logprobs
        return (
            None
            if num_top is None
            else LogprobFormat(num_top, bool(request.return_tokens_as_token_ids), bool(request.logprob_token_ids))
        )

    def name(self, token_id: int, raw: bytes, prefix: str) -> str:
        """A token's text; where it is only part of a character, its bytes as OpenAI writes them."""
        if self.as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What an answer says of its prompt's tokens."""

    logprobs: msgspec.Raw | None  # JSON of PromptLogprobs, vLLM's form, when asked with prompt_logprobs
    echo: dict[str, Any] | None  # as completions write those of the output, with echo and logprobs


def chat_logprobs(tokenizer: Tokenizer, delta: Delta, form: LogprobFormat) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one entry a token, each with the likeliest ones."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": form.name(token_id, raw, ""), "logprob": max(logprob, LOWEST), "bytes": list(raw)}

    content = []
    for token_id, at in zip(delta.token_ids, delta.logprobs or (), strict=True):
        top = zip(at.top_ids[: form.num_top], at.top_logprobs, strict=False)
        content.append({**entry(token_id, at.logprob), "top_logprobs": [entry(*candidate) for candidate in top]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Sequence[int] | None,
    form: LogprobFormat,
) -> dict[str, Any]:
    """`choices[].logprobs` of completions: parallel lists, one entry a token. The top dicts hold the token itself too,
    so up to k + 1. `logprobs` is None at a prompt's first token, which nothing stands before.
    """

    def name(token_id: int) -> str:
        return form.name(token_id, tokenizer.token_bytes(token_id), "bytes:")

    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        tokens.append(name(token_id))
        if at is None:
            values.append(None)
            tops.append(None)
            continue
        logprob = max(at.logprob, LOWEST)
        values.append(logprob)
        top: dict[str, float] = {}
        for candidate, value in zip(at.top_ids[: form.num_top], at.top_logprobs, strict=False):
            top.setdefault(name(candidate), max(value, LOWEST))  # of two with one name the likelier
        top.setdefault(tokens[-1], logprob)
        tops.append(top)
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def prompt_report(
    tokenizer: Tokenizer,
    prompt: Prompt,
    entries: Sequence[TokenLogprobs],
    text: TextOptions,
    num_top: int | None,
    echo: LogprobFormat | None,
) -> PromptReport:
    """`entries`: of the prompt's tokens 1 …; `num_top`: as prompt_logprobs asks, `echo`: as echo and logprobs ask."""
    known = [None, *entries]
    logprobs = None
    if num_top is not None:
        table = prompt_logprobs(tokenizer, prompt.token_ids, known, num_top)
        rows = (msgspec.json.encode(row) for row in table)  # one by one: whoever encodes holds the interpreter's lock
        logprobs = msgspec.Raw(b"[" + b",".join(rows) + b"]")
    echoed = None
    if echo is not None:
        offsets = []
        position = 0
        shown = replace(text, skip_special_tokens=False, spaces_between_special_tokens=True)
        detokenizer = shown.detokenizer(tokenizer, ())
        for token_id in prompt.token_ids:
            offsets.append(position)
            piece = detokenizer.feed(token_id)
            if token_id not in tokenizer.special or prompt.echo.startswith(piece, position):
                position += len(piece)
        echoed = completion_logprobs(tokenizer, prompt.token_ids, known, offsets, echo)
    return PromptReport(logprobs, echoed)


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], num_top: int
) -> PromptLogprobs:
    """vLLM's form: of each place the token itself, then the likeliest ones, by token id; `num_top` -1: all."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}

    table: PromptLogprobs = []
    for token_id, at in zip(token_ids, entries, strict=True):
        if at is None:
            table.append(None)
            continue
        row = {token_id: entry(token_id, at.logprob, at.rank)}
        top_ids = at.top_ids if num_top == -1 else at.top_ids[:num_top]
        for rank, (candidate, value) in enumerate(zip(top_ids, at.top_logprobs, strict=False), 1):
            if candidate not in row:
                row[candidate] = entry(candidate, value, rank)
        table.append(row)
    return table
