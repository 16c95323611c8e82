"""The events of a response, numbered, and the response that they add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from ...errors import ApiError
from ...generation.choice import Choice, Delta
from ...generation.generation import Generation
from ...generation.logprobs import LogprobFormat, chat_logprobs
from ...parsers.parts import CallBegin, Content, Part, Reasoning
from ...text.tokenizer import Tokenizer
from .log import EventLog
from .tools import Called, InputText

encode = msgspec.json.Encoder().encode

# item type → (prefix of its id, events of its text, field that has the whole text in the last of them)
_KINDS = {
    "message": ("msg", "response.output_text", "text"),
    "reasoning": ("rs", "response.reasoning_text", "text"),
    "function_call": ("fc", "response.function_call_arguments", "arguments"),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input", "input"),
}
_CALLS = ("function_call", "custom_tool_call")


class ResponseEvents:
    """Of one response, which has one choice. `response` is up to date between calls, but for an item that is open."""

    def __init__(
        self,
        generation: Generation,
        response: dict[str, Any],
        tokenizer: Tokenizer,
        logprobs: LogprobFormat | None,
        called: Mapping[str, Called],
        finished: Callable[[dict[str, Any]], None],
    ) -> None:
        """`response`: as it is when it begins; `called`: see Offer; `finished` gets it when it is whole."""
        self.response = response
        self.generation = generation
        self.log: EventLog | None = None  # of one that runs in the background
        self._tokenizer = tokenizer
        self._form = logprobs
        self._called = called
        self._finished = finished
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = response["output"]
        self._item: dict[str, Any] | None = None  # the one that is open
        self._texts: list[str] = []  # of that item
        self._input = InputText()  # of a custom tool's call
        self._head = self._tail = b""  # of the event that has more of it
        self._num_tokens = 0
        # Log-probabilities as JSON, since each is told several times: of the item, and those that no event has had.
        self._logprobs: list[bytes] = []
        self._pending: list[bytes] = []

    # ---- as the stream of a request calls them ----

    def openings(self) -> Iterable[bytes]:
        return (self._about_response("response.created") + self._about_response("response.in_progress"),)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one engine output, often none or one."""
        if self._form is not None and delta.token_ids:
            self._keep_logprobs(choice, delta, self._form)
        if delta.parts is None:
            return self._more("message", delta.text) if delta.text else b""
        return b"".join(map(self._part, delta.parts))

    def closing(self) -> bytes:
        (choice,) = self.generation.choices
        response = self.response
        cut = choice.finish_reason == "length"
        cancelled = choice.stop_reason == "abort"
        events = b""
        if self._item is None and not self._output:
            events = self._open("message")  # agents wait for one, even if it is empty
        events += self._close("incomplete" if cut or cancelled else "completed")
        response["status"] = "cancelled" if cancelled else "incomplete" if cut else "completed"
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["completed_at"] = None if cut or cancelled else int(time.time())
        response["usage"] = usage(self.generation)
        self._finished(response)
        return events + self._about_response("response.completed" if not cut and not cancelled else _INCOMPLETE)

    def failure(self, error: ApiError) -> bytes:
        """The last events: what went wrong, and the response that has it."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        events = self._event("error", {"code": error.code or code, "message": error.message, "param": error.param})
        return events + self._about_response("response.failed")

    # ---- items ----

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Content):
            return self._more("message", part.text)
        if isinstance(part, Reasoning):
            return self._more("reasoning", part.text)
        if isinstance(part, CallBegin):
            return self._close("completed") + self._open_call(part)
        if self._item is not None and self._item["type"] == "custom_tool_call":
            text = self._input.feed(part.text)
            return self._more("custom_tool_call", text) if text else b""
        return self._more("function_call", part.text)

    def _open_call(self, part: CallBegin) -> bytes:
        called = self._called.get(part.name)
        if called is None:
            return self._open("function_call", call_id=part.id, name=part.name)
        fields = {"call_id": part.id, "name": called.name}
        if called.namespace is not None:
            fields["namespace"] = called.namespace
        self._input = InputText()
        return self._open("custom_tool_call" if called.is_custom else "function_call", **fields)

    def _more(self, kind: str, text: str) -> bytes:
        events = b""
        if self._item is None or self._item["type"] != kind:
            events = self._close("completed") + self._open(kind)
        self._texts.append(text)
        tail = self._tail
        if self._pending and kind == "message":
            self._logprobs += self._pending
            tail = b',"logprobs":[%b]}\n\n' % b",".join(self._pending)
            self._pending = []
        self._number += 1
        return b'%b%b%d,"delta":%b%b' % (events, self._head, self._number - 1, encode(text), tail)

    def _open(self, kind: str, **fields: str) -> bytes:
        prefix, event, _ = _KINDS[kind]
        index = len(self._output)
        id = f"{prefix}_{self.response['id'].removeprefix('resp_')}_{index}"
        item: dict[str, Any] = {"type": kind, "id": id, "status": "in_progress", **fields}
        item |= _EMPTY[kind]
        self._item = item
        events = self._event("response.output_item.added", {"output_index": index, "item": item})
        where: dict[str, Any] = {"item_id": id, "output_index": index}
        if kind not in _CALLS:
            where["content_index"] = 0
            events += self._event("response.content_part.added", {**where, "part": _part_of(kind, "")})
        more = f"{event}.delta"
        self._head = b'event: %b\ndata: %b,"sequence_number":' % (more.encode(), encode({"type": more, **where})[:-1])
        self._tail = b',"logprobs":[]}\n\n' if kind == "message" else b"}\n\n"
        return events

    def _close(self, status: str) -> bytes:
        """Of the item that is open, if there is one."""
        item = self._item
        if item is None:
            return b""
        rest = self._input.finish() if item["type"] == "custom_tool_call" else ""
        events = self._more("custom_tool_call", rest) if rest else b""
        kind, index, text = item["type"], len(self._output), "".join(self._texts)
        _, event, field = _KINDS[kind]
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        item = {**item, "status": status}
        if kind == "function_call":
            item["arguments"] = text
            events += self._event(f"{event}.done", {**where, "name": item["name"], field: text})
        elif kind == "custom_tool_call":
            item["input"] = text
            events += self._event(f"{event}.done", {**where, field: text})
        else:
            where["content_index"] = 0
            logprobs = msgspec.Raw(b"[%b]" % b",".join(self._logprobs + self._pending))
            part = _part_of(kind, text, logprobs)
            item["content"] = [part]
            more = {"logprobs": logprobs} if kind == "message" else {}
            events += self._event(f"{event}.done", {**where, field: text, **more})
            events += self._event("response.content_part.done", {**where, "part": part})
            if kind == "message":
                self._pending = []
        self._output.append(item)
        events += self._event("response.output_item.done", {"output_index": index, "item": item})
        self._item, self._texts, self._logprobs = None, [], []
        return events

    def _keep_logprobs(self, choice: Choice, delta: Delta, form: LogprobFormat) -> None:
        """Those of the reasoning, which is at the beginning, have no place in a response."""
        entries = chat_logprobs(self._tokenizer, delta, form)["content"]
        self._pending += map(encode, entries[max(0, choice.num_reasoning_tokens - self._num_tokens) :])
        self._num_tokens += len(entries)

    # ---- bytes ----

    def _about_response(self, kind: str) -> bytes:
        return self._event(kind, {"response": self.response})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        data = encode({"type": kind, "sequence_number": self._number - 1, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


_INCOMPLETE = "response.incomplete"
_NO_ENTRIES = msgspec.Raw(b"[]")
_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": [], "encrypted_content": None},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}


def _part_of(kind: str, text: str, logprobs: msgspec.Raw = _NO_ENTRIES) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def usage(generation: Generation) -> dict[str, Any]:
    counts = generation.usage()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
    }
