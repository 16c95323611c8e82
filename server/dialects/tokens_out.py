"""Answers in token ids, whole and streamed, in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Any

import msgspec

from ..errors import ApiError
from ..generation.answer import Answer
from ..generation.choice import Choice, Delta
from ..generation.generation import Generation
from ..generation.logprobs import LOWEST, LogprobFormat, chat_logprobs
from ..text.tokenizer import Tokenizer
from .chunks import DONE

encode = msgspec.json.Encoder().encode


class TokenForm:
    """How an answer is written: `form` says what of log-probabilities, `with_text` whether text stands beside."""

    def __init__(self, tokenizer: Tokenizer, form: LogprobFormat | None, with_text: bool) -> None:
        self._tokenizer, self._form, self._with_text = tokenizer, form, with_text
        self.mode = "text" if with_text else "tokens"

    def choice(self, choice: Choice, delta: Delta, finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"index": choice.index, "token_ids": delta.token_ids, "logprobs": self._logprobs(delta)}
        if self._with_text:
            said["text"] = delta.text
        return {**said, "finish_reason": finish, "stop_reason": choice.stop_reason}

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self.choice(answer.choice, answer.delta, answer.choice.ending)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._form is None:
            return None
        if self._with_text:
            return chat_logprobs(self._tokenizer, delta, self._form)
        content = []
        for token_id, at in zip(delta.token_ids, delta.logprobs or (), strict=True):
            top = zip(at.top_ids[: self._form.num_top], at.top_logprobs, strict=False)
            ranks: Iterator[int | None] = repeat(None) if self._form.named else count(1)
            others = [_entry(candidate, value, rank) for rank, (candidate, value) in zip(ranks, top, strict=False)]
            content.append({**_entry(token_id, at.logprob, at.rank), "top_logprobs": others})
        return {"content": content}


def _entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}", "token_id": token_id, "logprob": max(logprob, LOWEST), "rank": rank,
    }  # fmt: skip


class TokenChunks:
    """The events of one answer."""

    def __init__(self, generation: Generation, form: TokenForm, id: str, usage: tuple[bool, bool], shown: bool) -> None:
        """`usage`: whether the end has it, whether every chunk does; `shown`: the first chunk has the prompt's ids."""
        self._generation, self._form, self._id = generation, form, id
        self._usage, self._continuous = usage
        self._prompt_ids = list(generation.prompts[0].token_ids) if shown else None

    def openings(self) -> Iterable[bytes]:
        return ()

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        if not delta.token_ids and not delta.text and delta.finish_reason is None:
            return b""
        ending = None if delta.finish_reason is None else choice.ending
        return self._event([self._form.choice(choice, delta, ending)], self._continuous)

    def _event(self, choices: list[dict[str, Any]], with_usage: bool) -> bytes:
        chunk: dict[str, Any] = {"request_id": self._id, "output_mode": self._form.mode, "choices": choices}
        if with_usage:
            chunk["usage"] = self._generation.usage()
        if self._prompt_ids is not None:
            chunk["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        return b"data: " + encode(chunk) + b"\n\n"

    def closing(self) -> bytes:
        return (self._event([], True) if self._usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE
