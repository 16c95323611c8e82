"""The events of a message in Anthropic's API, and the message that they add up to."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from ...errors import ApiError
from ...generation.choice import Choice, Delta
from ...generation.generation import Generation
from ...parsers.parts import CallBegin, Content, Part, Reasoning

encode = msgspec.json.Encoder().encode

# type of a block → (type of its deltas, field of the text in them)
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(frozen=True)
class Limits:
    """Where a message may end."""

    max_tokens: int
    max_model_len: int
    stops: tuple[str, ...]


class MessageEvents:
    """Of one message, which has one choice."""

    def __init__(self, generation: Generation, id: str, model: str, limits: Limits) -> None:
        self.message: dict[str, Any] = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(generation),
        }
        self._id = id
        self._generation = generation
        self._limits = limits
        self._content: list[dict[str, Any]] = self.message["content"]
        self._block: dict[str, Any] | None = None  # the one that is open
        self._texts: list[str] = []  # of that block
        self._head = b""  # of the event that has more of it
        self._calls = False

    def openings(self) -> Iterable[bytes]:
        message = {**self.message, "usage": {**self.message["usage"], "output_tokens": 0}}
        return (_event("message_start", {"message": message}) + _event("ping", {}),)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one engine output, often none or one."""
        if delta.parts is None:
            return self._more("text", delta.text) if delta.text else b""
        return b"".join(map(self._part, delta.parts))

    def closing(self) -> bytes:
        events = self._close()
        reason, sequence = self._stop()
        counts = usage(self._generation)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": counts}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return events + _event("message_delta", {"delta": delta, "usage": counts}) + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error.anthropic_body(self._id.removeprefix("msg_"))

    def _stop(self) -> tuple[str, str | None]:
        (choice,) = self._generation.choices
        if choice.finish_reason == "length":
            full = len(choice.prompt.token_ids) + choice.num_tokens >= self._limits.max_model_len
            beyond = full and choice.num_tokens < self._limits.max_tokens
            return "model_context_window_exceeded" if beyond else "max_tokens", None
        if self._calls:
            return "tool_use", None
        if isinstance(choice.stop_reason, str) and choice.stop_reason in self._limits.stops:
            return "stop_sequence", choice.stop_reason
        return "end_turn", None

    # ---- blocks ----

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Content):
            return self._more("text", part.text)
        if isinstance(part, Reasoning):
            return self._more("thinking", part.text)
        if isinstance(part, CallBegin):
            self._calls = True
            return self._open({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        return self._more("tool_use", part.text)

    def _more(self, kind: str, text: str) -> bytes:
        events = b""
        if self._block is None or self._block["type"] != kind:
            events = self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._texts.append(text)
        return b"%b%b%b}}\n\n" % (events, self._head, encode(text))

    def _open(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        index = len(self._content)
        self._block = block
        kind, field = _DELTAS[block["type"]]
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (index, kind.encode(), field.encode())
        )
        return events + _event("content_block_start", {"index": index, "content_block": block})

    def _close(self) -> bytes:
        """Of the block that is open, if there is one."""
        block = self._block
        if block is None:
            return b""
        index, text, kind = len(self._content), "".join(self._texts), block["type"]
        events = b""
        if kind == "tool_use":
            block = {**block, "input": _object(text)}
        else:
            block = {**block, kind: text}
        if kind == "thinking":
            # Clients keep only what is signed; nobody here checks it.
            block["signature"] = base64.b64encode(sha256(text.encode()).digest()).decode()
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events = _event("content_block_delta", {"index": index, "delta": delta})
        self._content.append(block)
        self._block, self._texts = None, []
        return events + _event("content_block_stop", {"index": index})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; none where it was cut off, which the stop reason says."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def usage(generation: Generation) -> dict[str, Any]:
    """What was cached counts beside the other input, not with it."""
    counts = generation.usage()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
    }
