"""The events of a chat in Cohere's API, and the answer that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ...errors import ApiError
from ...generation.choice import Choice, Delta
from ...generation.generation import Generation
from ...generation.logprobs import LOWEST
from ...parsers.parts import CallBegin, Content, Part, Reasoning
from ...text.tokenizer import Tokenizer
from ..chunks import DONE

encode = msgspec.json.Encoder().encode


class CohereEvents:
    """Of one answer, which has one choice."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, id: str, *, logprobs: bool) -> None:
        self.message: dict[str, Any] = {"role": "assistant"}
        self.logprobs: list[dict[str, Any]] | None = [] if logprobs else None
        self.finish_reason = "COMPLETE"
        self._id = id
        self._generation = generation
        self._tokenizer = tokenizer
        self._kind = ""  # of the block that is open: text, thinking or call
        self._texts: list[str] = []  # of that block
        self._head = b""  # of the event that has more of it
        self._number = -1  # of the last block of content
        self._calls: list[dict[str, Any]] = []

    @property
    def answer(self) -> dict[str, Any]:
        """The whole, once it has ended."""
        said = {"id": self._id, "finish_reason": self.finish_reason, "message": self.message, "usage": self._usage()}
        return said if self.logprobs is None else said | {"logprobs": self.logprobs}

    def openings(self) -> Iterable[bytes]:
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return (_event("message-start", {"id": self._id, "delta": {"message": message}}),)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one engine output, often none or one."""
        more = b""
        if self.logprobs is not None and delta.token_ids:
            entries = self._entries(delta)
            self.logprobs += entries
            more = b',"logprobs":' + encode(_joined(entries))
        if delta.parts is None:
            return self._more("text", delta.text, more) if delta.text or more else b""
        events = b""
        for part in delta.parts:
            events += self._part(part, more if isinstance(part, Content | Reasoning) else b"")
            more = b"" if isinstance(part, Content | Reasoning) else more
        return events

    def closing(self) -> bytes:
        events = self._close()
        self.finish_reason = self._reason()
        if self._calls:
            self.message["tool_calls"] = self._calls
        return events + self._end({}) + DONE

    def failure(self, error: ApiError) -> bytes:
        self.finish_reason = "TIMEOUT" if error.status == 408 else "ERROR"
        return self._end({"error": error.message}) + DONE

    def _end(self, more: dict[str, Any]) -> bytes:
        delta = {**more, "finish_reason": self.finish_reason, "usage": self._usage()}
        return _event("message-end", {"id": self._id, "delta": delta})

    def _reason(self) -> str:
        (choice,) = self._generation.choices
        if choice.finish_reason == "length":
            return "MAX_TOKENS"
        if self._calls:
            return "TOOL_CALL"
        # Of numbers and words: what a request has named is a text, and only that is called a sequence.
        named = isinstance(choice.stop_reason, str) and choice.stop_reason not in ("abort", "repetition")
        return "STOP_SEQUENCE" if named else "COMPLETE"

    def _usage(self) -> dict[str, Any]:
        counts = self._generation.usage()
        numbers = {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]}
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {"billed_units": numbers, "tokens": numbers, "cached_tokens": cached}

    def _entries(self, delta: Delta) -> list[dict[str, Any]]:
        found = []
        for token_id, at in zip(delta.token_ids, delta.logprobs or (), strict=True):
            text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
            found.append({"text": text, "token_ids": [token_id], "logprobs": [max(at.logprob, LOWEST)]})
        return found

    # ---- blocks ----

    def _part(self, part: Part, more: bytes) -> bytes:
        if isinstance(part, Content):
            return self._more("text", part.text, more)
        if isinstance(part, Reasoning):
            return self._more("thinking", part.text, more)
        if isinstance(part, CallBegin):
            return self._open_call(part)
        return self._more("call", part.text, b"")

    def _more(self, kind: str, text: str, more: bytes) -> bytes:
        events = b"" if self._kind == kind else self._open_content(kind)
        self._texts.append(text)
        return b"%b%b%b%b%b}\n\n" % (events, self._head, encode(text), b"}}}}" if kind == "call" else b"}}}", more)

    def _open_content(self, kind: str) -> bytes:
        events = self._close()
        self._kind = kind
        self._number += 1
        self._head = (
            b'event: content-delta\ndata: {"type":"content-delta","index":%d,"delta":{"message":{"content":{"%b":'
            % (self._number, kind.encode())
        )
        opened = {"content": {"type": kind, kind: ""}}
        return events + _event("content-start", {"index": self._number, "delta": {"message": opened}})

    def _open_call(self, part: CallBegin) -> bytes:
        events = self._close()
        self._kind = "call"
        number = len(self._calls)
        call = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        self._calls.append(call)
        self._head = (
            b'event: tool-call-delta\ndata: {"type":"tool-call-delta","index":%d,"delta":{"message":{"tool_calls":'
            b'{"function":{"arguments":' % number
        )
        return events + _event("tool-call-start", {"index": number, "delta": {"message": {"tool_calls": call}}})

    def _close(self) -> bytes:
        """Of the block that is open, if there is one."""
        kind, text = self._kind, "".join(self._texts)
        self._kind, self._texts = "", []
        if not kind:
            return b""
        if kind == "call":
            number = len(self._calls) - 1
            function = self._calls[number]["function"]
            self._calls[number] = {**self._calls[number], "function": {**function, "arguments": text}}
            return _event("tool-call-end", {"index": number})
        self.message.setdefault("content", []).append({"type": kind, kind: text})
        return _event("content-end", {"index": self._number})


def _joined(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several tokens, as an event has them."""
    return {
        "text": "".join(entry["text"] for entry in entries),
        "token_ids": [id for entry in entries for id in entry["token_ids"]],
        "logprobs": [value for entry in entries for value in entry["logprobs"]],
    }


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
