"""The chunks of a completion, and the whole of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..generation.answer import Answer
from ..generation.choice import Choice, Delta
from ..generation.generation import Generation
from ..generation.logprobs import LogprobFormat, PromptReport, completion_logprobs
from ..text.tokenizer import Tokenizer
from ..wire.requests import CompletionRequest
from .chunks import Chunks, encode


class CompletionChunks(Chunks):
    object = "text_completion"

    def _head(self, index: int) -> bytes:
        return self._open + b'%d,"text":' % index

    def _after(self, logprobs: bytes) -> bytes:
        return b',"logprobs":' + logprobs + b',"finish_reason":null,"stop_reason":null'

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert self._form is not None
        return completion_logprobs(self._tokenizer, delta.token_ids, delta.logprobs or (), delta.offsets, self._form)

    def openings(self) -> Iterable[bytes]:
        if self._generation.scores_prompts:  # several prompts are described one after the other
            self._unopened = set(range(len(self._generation.choices)))
            return ()
        return super().openings()

    def _prelude(self, choice: Choice) -> bytes:
        report = self._reports[choice.index // self._generation.n]
        if report is None and not choice.prompt.echo and not self._token_ids:
            return b""
        echoed = b"null" if report is None or report.echo is None else encode(report.echo)
        data = self._before_text[choice.index] + encode(choice.prompt.echo) + self._after(echoed)
        if self._token_ids:
            data += b',"token_ids":[],"prompt_token_ids":' + self._prompt_ids(choice.prompt)
        if report is not None and report.logprobs is not None:
            data += b',"prompt_logprobs":' + encode(report.logprobs)
        return data + self._close(opening=not self._generation.scores_prompts)

    def _finish(self, choice: Choice, reason: str) -> bytes:
        return b'%b%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b%b' % (
            self._open, choice.index, encode(reason), encode(choice.stop_reason), self._close(),
        )  # fmt: skip


def choices(
    tokenizer: Tokenizer,
    body: CompletionRequest,
    generation: Generation,
    answers: Sequence[Answer],
    reports: Sequence[PromptReport | None],
) -> list[dict[str, Any]]:
    prompt_ids: list[msgspec.Raw | None] = [None] * len(generation.prompts)
    if body.return_token_ids:  # encoded once, whatever the number of choices
        prompt_ids = [msgspec.Raw(encode(list(prompt.token_ids))) for prompt in generation.prompts]
    return [
        one_choice(tokenizer, body, answer, reports[i // generation.n], prompt_ids[i // generation.n])
        for i, answer in enumerate(answers)
    ]


def one_choice(
    tokenizer: Tokenizer,
    body: CompletionRequest,
    answer: Answer,
    report: PromptReport | None,
    prompt_ids: msgspec.Raw | None,
) -> dict[str, Any]:
    form = LogprobFormat.of(body)
    logprobs = None
    if form is not None:
        logprobs = completion_logprobs(tokenizer, answer.token_ids, answer.logprobs, answer.offsets, form)
        if report is not None and report.echo is not None:
            logprobs = {name: report.echo[name] + values for name, values in logprobs.items()}
    return {
        "index": answer.choice.index,
        "text": answer.choice.prompt.echo + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.choice.finish_reason,
        "stop_reason": answer.choice.stop_reason,
        "token_ids": answer.token_ids if body.return_token_ids else None,
        "prompt_logprobs": None if report is None else report.logprobs,
        "prompt_token_ids": prompt_ids,
    }


def one_chunk(tokenizer: Tokenizer, body: CompletionRequest, choice: Choice, delta: Delta) -> dict[str, Any]:
    """The choice of a chunk that says all of one delta."""
    form, logprobs = LogprobFormat.of(body), None
    if form is not None and delta.logprobs:
        logprobs = completion_logprobs(tokenizer, delta.token_ids, delta.logprobs, delta.offsets, form)
    return {
        "index": choice.index,
        "text": delta.text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": choice.stop_reason,
    }
