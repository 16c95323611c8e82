"""The chunks of a chat completion, and the whole of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..generation.answer import Answer
from ..generation.choice import Choice, Delta
from ..generation.logprobs import LogprobFormat, chat_logprobs
from ..parsers.parts import CallBegin, Content, Part, Reasoning
from ..text.tokenizer import Tokenizer
from ..wire.requests import ChatRequest
from .chunks import Chunks, encode


class ChatChunks(Chunks):
    object = "chat.completion.chunk"

    def _head(self, index: int) -> bytes:
        return self._open + b'%d,"delta":{"content":' % index

    def _after(self, logprobs: bytes) -> bytes:
        return b'},"logprobs":' + logprobs + b',"finish_reason":null'

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert self._form is not None
        return chat_logprobs(self._tokenizer, delta, self._form)

    def _prelude(self, choice: Choice) -> bytes:
        """The role, exactly once a choice: SDKs concatenate it. Then what the answer goes on from, where it is wanted.

        A chat has one prompt: what there is to say of it comes with the role, its log-probabilities once.
        """
        close = self._close(opening=True)
        extra = b""
        if self._token_ids:
            extra = b',"prompt_token_ids":' + self._prompt_ids(choice.prompt)
        (report,) = self._reports
        if report is not None and choice.index == 0:
            extra += b',"prompt_logprobs":' + encode(report.logprobs)
        data = b'%b%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b%b' % (
            self._open, choice.index, extra, close[2:],
        )  # fmt: skip
        if choice.prompt.echo:
            data += self._before_text[choice.index] + encode(choice.prompt.echo) + self._after(b"null") + close
        return data

    def _said(self, choice: Choice, delta: Delta, parts: list[Part]) -> bytes:
        """An event a part. What is said of the tokens goes with the first."""
        if not parts and not (delta.token_ids and self._every_token):
            return b""
        if len(parts) == 1 and isinstance(parts[0], Content) and not self._every_token:
            return self._before_text[choice.index] + encode(parts[0].text) + self._after(b"null") + self._close()
        close = self._close()
        data = b""
        logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta))
        token_ids = b',"token_ids":' + encode(delta.token_ids) if self._token_ids else b""
        for part in parts or (None,):
            said = b"{}" if part is None else encode(_fields(part))
            data += b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":null%b%b' % (
                self._open, choice.index, said, logprobs, token_ids, close,
            )  # fmt: skip
            logprobs, token_ids = b"null", b""
        return data

    def _finish(self, choice: Choice, reason: str) -> bytes:
        return b'%b%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b%b' % (
            self._open, choice.index, encode(choice.ending), encode(choice.stop_reason), self._close(),
        )  # fmt: skip


def _fields(part: Part) -> dict[str, Any]:
    """SDKs put strings together and everything else in the place of what was there: id, type and name come once."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning": part.text, "reasoning_content": part.text}
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def one_chunk(tokenizer: Tokenizer, body: ChatRequest, choice: Choice, delta: Delta, *, opens: bool) -> dict[str, Any]:
    """The choice of a chunk that says all of one delta; `opens`: it is the first of its choice."""
    said: dict[str, Any] = {"role": "assistant"} if opens else {}
    for part in (Content(delta.text),) if delta.parts is None and delta.text else delta.parts or ():
        for name, value in _fields(part).items():
            said[name] = said[name] + value if name in said else value  # texts, and lists of calls
    form = LogprobFormat.of(body) if delta.logprobs else None
    return {
        "index": choice.index,
        "delta": said,
        "logprobs": None if form is None else chat_logprobs(tokenizer, delta, form),
        "finish_reason": None if delta.finish_reason is None else choice.ending,
        "stop_reason": choice.stop_reason,
    }


def choices(tokenizer: Tokenizer, body: ChatRequest, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [_choice(tokenizer, body, answer) for answer in answers]


def message(answer: Answer) -> dict[str, Any]:
    """What the assistant said. Its fields are there when they have something to say, and those that always are."""
    reasoning: str | None = None
    content = answer.choice.prompt.echo
    calls: list[dict[str, Any]] = []
    if not answer.parts:
        content += answer.text
    for part in answer.parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Reasoning):
            reasoning = (reasoning or "") + part.text
        elif isinstance(part, CallBegin):
            calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        else:
            calls[part.index]["function"]["arguments"] += part.text
    said: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not answer.parts else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": reasoning,
    }
    if reasoning is not None:
        said["reasoning_content"] = reasoning
    if calls:
        said["tool_calls"] = calls
    return said


def _choice(tokenizer: Tokenizer, body: ChatRequest, answer: Answer) -> dict[str, Any]:
    form = LogprobFormat.of(body)
    return {
        "index": answer.choice.index,
        "message": message(answer),
        "logprobs": None if form is None else chat_logprobs(tokenizer, answer.delta, form),
        "finish_reason": answer.choice.ending,
        "stop_reason": answer.choice.stop_reason,
        "token_ids": answer.token_ids if body.return_token_ids else None,
    }
