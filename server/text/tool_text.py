"""Tools and calls as text: read back from what a template writes, and written for templates that show none."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..errors import bad_request
from ..parsers.formats import ReasoningFormat, ToolFormat, known
from ..parsers.json_list import GENERIC
from ..parsers.parts import CallArguments, CallBegin
from ..parsers.reader import Reader
from ..parsers.text_reader import Reading
from .capabilities import Capabilities
from .probe import TOOL, call
from .shape import Message, text_of

REMEDY = (
    "start the server with --tools-in-system, which writes what is not shown into the conversation, or with another "
    "template (--chat-template)"
)
_SAMPLE = {"query": "a word", "limit": 2}


def calls_in(
    text: str, tools: Collection[str], format: ToolFormat, reasoning: ReasoningFormat | None = None
) -> list[tuple[str, Any]]:
    """(name, arguments) of the calls that are read in an answer."""

    def read(reader: Reader) -> Reading[None]:
        if reasoning is not None:
            yield from reasoning.read(reader, None, format)
        yield from format.read(reader)

    reader = Reader(read, dict.fromkeys(tools, "{}"), new_id=format.new_id)
    found: list[tuple[str, str]] = []
    for part in reader.feed(text) + reader.finish():
        if isinstance(part, CallBegin):
            found.append((part.name, ""))
        elif isinstance(part, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return [(name, json.loads(arguments or "{}")) for name, arguments in found]


def reads(format: ToolFormat, reasoning: ReasoningFormat | None, written: str, special: Collection[str]) -> bool:
    """Whether the probe's call is read in what a template writes of it. `special`: the special tokens, of which an
    answer keeps those of its formats."""
    kept = (*format.markers, *(() if reasoning is None else reasoning.markers))
    for token in special:
        if token not in kept:
            written = written.replace(token, "")
    function = call(1)["function"]
    found = calls_in(written.lstrip(), [function["name"]], format, reasoning)
    return found == [(function["name"], function["arguments"])]


def reader_of(
    format: ToolFormat, reasoning: ReasoningFormat | None, written: str, special: Collection[str]
) -> ToolFormat | None:
    """The format that reads what the template writes: this one if it does, or else one that would write it so."""
    if reads(format, reasoning, written, special):
        return format
    others = (one for one in known()[0] if one.begin(TOOL["function"]["name"]).strip() in written)
    return next((one for one in others if reads(one, reasoning, written, special)), None)


def check_shown(messages: list[Message], tools: Any, can: Capabilities) -> None:
    """Raises ApiError (400) for what the prompt would lack."""
    if tools and not can.shows_tools:
        raise bad_request(
            f"This model's chat template shows no tools, so the model would not know of them: leave 'tools' out, or "
            f"{REMEDY}.",
            "tools",
            "unsupported_value",
        )
    for i, message in enumerate(messages):
        what = "calls" if message.get("tool_calls") and not can.shows_calls else ""
        if message["role"] in ("tool", "function") and not can.shows_results:
            what = "results"
        if what:
            raise bad_request(
                f"This model's chat template shows no {what} of tools, which 'messages[{i}]' has: leave them out, or "
                f"{REMEDY}.",
                f"messages[{i}]",
                "unsupported_value",
            )


@dataclass(frozen=True)
class ToolText:
    """How tools, calls and results are written where the template shows none: calls as the model's format has them."""

    format: ToolFormat
    arguments: Callable[[dict[str, Any]], str]

    @staticmethod
    def of(format: ToolFormat | None) -> ToolText:
        """Of a format that is not known, or has arguments in a form of its own, calls are a JSON list."""
        for one in (format or GENERIC, GENERIC):
            for arguments in (_as_json, _as_keywords):
                written = ToolText(one, arguments)
                if calls_in(written.calls([("a_tool", _SAMPLE)]), ["a_tool"], one) == [("a_tool", _SAMPLE)]:
                    return written
        raise AssertionError("a JSON list is read")

    def calls(self, calls: list[tuple[str, Any]]) -> str:
        format = self.format
        texts = [
            f"{format.begin(name)}{self.arguments(given if isinstance(given, dict) else {'text': given})}{format.end}"
            for name, given in calls
        ]
        return f"{format.opening}{format.separator.join(texts)}{format.closing}"

    def written(self, messages: list[Message], tools: Any, can: Capabilities) -> tuple[list[Message], Any]:
        """Messages and tools, with what the template does not show in the messages' text."""
        if not (can.shows_calls and can.shows_results):
            messages = self._in_text(messages)
        if tools and not can.shows_tools:
            messages = [{"role": "system", "content": self._instructions(tools)}, *messages]
            if len(messages) > 1 and messages[1]["role"] == "system":
                content = f"{text_of(messages[1].get('content'))}\n\n{messages[0]['content']}"
                messages = [{**messages[1], "content": content}, *messages[2:]]
            tools = None
        return messages, tools

    def _instructions(self, tools: list[dict[str, Any]]) -> str:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You can call these functions, each described by a line of JSON:\n{listed}\n\nTo call one, answer with "
            f"nothing but its name and arguments, written so:\n{self.calls([('NAME', {'ARGUMENT': 'VALUE'})])}"
        )

    def _in_text(self, messages: list[Message]) -> list[Message]:
        found = []
        names: dict[str, str] = {}  # of the tools, by the ids of their calls
        called: list[str] = []  # whose results have not come, where they have no ids
        for message in messages:
            if calls := message.get("tool_calls"):
                functions = [call["function"] for call in calls]
                names |= {call["id"]: call["function"]["name"] for call in calls if call.get("id") is not None}
                called = [function["name"] for function in functions]
                text = self.calls([(function["name"], function["arguments"]) for function in functions])
                said = text_of(message.get("content"))
                message = {name: value for name, value in message.items() if name != "tool_calls"}
                message["content"] = f"{said}\n\n{text}" if said else text
            elif message["role"] in ("tool", "function"):
                id = message.get("tool_call_id")
                by_order = called.pop(0) if called else None
                name = message.get("name") or (by_order if id is None else names.get(id)) or "the function"
                message = {"role": "user", "content": f"Result of {name}:\n{text_of(message.get('content'))}"}
            found.append(message)
        return found


def _as_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _as_keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
