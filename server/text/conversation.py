"""The messages of a chat, checked, and in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Required

import msgspec
from typing_extensions import TypedDict

from ..errors import bad_request, shorten, unsupported
from ..media import source

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_PARTS = 4096  # of one message
MAX_TOOL_CALLS = 1024  # of one message
MAX_ARGUMENT_MARKS = 1 << 18  # brackets and commas in the arguments of all calls, which come as text and become objects


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


class ImageURL(TypedDict, total=False):
    url: Required[str]  # https, http, or data:image/…;base64,
    detail: Literal["auto", "low", "high", "original"]  # low: made smaller first


class ImagePart(TypedDict, total=False):
    """Of users and tools, where the model sees pictures."""

    type: Required[Literal["image_url", "input_image"]]
    image_url: ImageURL | str | None
    detail: Literal["auto", "low", "high", "original"]
    uuid: str  # a name by which it may be sent again without its data


class FunctionCall(TypedDict):
    name: str
    arguments: str  # JSON


class ToolCall(TypedDict, total=False):
    id: str
    type: Literal["function"]
    function: Required[FunctionCall]


class Message(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant", "tool", "function"]]
    content: str | list[TextPart | ImagePart | RefusalPart] | None
    name: str
    tool_calls: list[ToolCall]  # of the assistant
    tool_call_id: str  # which call a tool's message answers
    reasoning: str  # of the assistant
    reasoning_content: str  # the same under its other name


def messages(value: Any, where: str = "messages") -> list[dict[str, Any]]:
    """Content is in each of them, also where the client left it out: a string, or parts, of which pictures are as they
    came. Raises ApiError."""
    if not isinstance(value, list):
        raise bad_request(f"'{where}' must be a list of messages.", where, "invalid_type")
    if not value:
        raise bad_request(f"'{where}' must not be empty.", where, "empty_array")
    num_marks = sum(text.count("{") + text.count("[") + text.count(",") for text in _argument_texts(value))
    if num_marks > MAX_ARGUMENT_MARKS:
        raise bad_request(
            f"The tool calls of '{where}' have arguments with {num_marks} brackets and commas; at most "
            f"{MAX_ARGUMENT_MARKS} are read. Leave calls out.",
            where,
            "too_many_values",
        )
    return [_message(message, f"{where}[{i}]") for i, message in enumerate(value)]


def _argument_texts(messages: list[Any]) -> Iterator[str]:
    """Those that there are, whatever else may be wrong."""
    for message in messages:
        if not isinstance(message, dict) or ("tool_calls" not in message and "function_call" not in message):
            continue
        calls = message.get("tool_calls")
        entries = calls if isinstance(calls, list) else ()
        functions = [call.get("function") for call in entries if isinstance(call, dict)]
        for function in (*functions, message.get("function_call")):
            if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
                yield text


def conversations(value: Any) -> list[list[dict[str, Any]]]:
    """Several of them. Raises ApiError."""
    if not isinstance(value, list):
        raise bad_request("'messages' must be a list of conversations.", "messages", "invalid_type")
    if not value:
        raise bad_request("'messages' must not be empty.", "messages", "empty_array")
    return [messages(one, f"messages[{i}]") for i, one in enumerate(value)]


def with_ids(messages: list[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """The same with other ids of tool calls."""
    changed = []
    for message in messages:
        if isinstance(id := message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": change(id)}
        if calls := message.get("tool_calls"):
            ids = [{"id": change(call["id"])} if "id" in call else {} for call in calls]
            message = {**message, "tool_calls": [call | id for call, id in zip(calls, ids, strict=True)]}
        changed.append(message)
    return changed


def _message(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    role = raw.get("role")
    if role is None:
        raise bad_request(f"Missing required parameter: '{where}.role'.", f"{where}.role", "missing_required_parameter")
    if role not in ROLES:
        raise bad_request(
            f"'{where}.role' must be one of {', '.join(ROLES)}, but it is {shorten(role)!r}.", f"{where}.role"
        )
    message: dict[str, Any] = {"role": role}
    for name in ("name", "tool_call_id"):
        if (text := _text(raw, name, where)) is not None:
            message[name] = text
    if role == "assistant":
        message |= _of_assistant(raw, where)
    content = raw.get("content")
    # An answer that called a tool, was refused, or was cut off while it thought, has no text; a tool may have none.
    if content in (None, []):
        message["content"] = message.get("refusal", "")
    else:
        message["content"] = _content(content, role, f"{where}.content")
    if "reasoning" in message and not message["content"]:
        message["thinking"] = message["reasoning"]  # gpt-oss's name, whose template accepts it beside no text
    return message


def _of_assistant(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """What only an assistant's message has."""
    fields: dict[str, Any] = {}
    if (refusal := _text(raw, "refusal", where)) is not None:
        fields["refusal"] = refusal
    reasoning = _text(raw, "reasoning", where)
    other = _text(raw, "reasoning_content", where)
    if (thought := reasoning if reasoning is not None else other) is not None:
        fields["reasoning"] = fields["reasoning_content"] = thought  # templates know it by one name or the other
    calls = raw.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise bad_request(f"'{where}.tool_calls' must be a list.", f"{where}.tool_calls", "invalid_type")
        if len(calls) > MAX_TOOL_CALLS:
            raise bad_request(
                f"'{where}.tool_calls' has {len(calls)} entries; at most {MAX_TOOL_CALLS} are allowed.",
                f"{where}.tool_calls",
            )
        if calls:  # the same as none: templates ask whether the field is there
            fields["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if (call := raw.get("function_call")) is not None:
        fields["function_call"] = _function(call, f"{where}.function_call")
    return fields


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    if (kind := raw.get("type", "function")) != "function":
        raise unsupported(f"{where}.type", f"A tool call of type {shorten(kind)!r}")
    call = {"type": "function", "function": _function(raw.get("function"), f"{where}.function")}
    if (id := _text(raw, "id", where)) is not None:
        call = {"id": id, **call}
    return call


def _function(raw: Any, where: str) -> dict[str, Any]:
    """Arguments come as JSON text; templates want the object. What a model got wrong stays text."""
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise bad_request(f"'{where}' must be an object with a name.", where, "invalid_type")
    arguments = raw.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        raise bad_request(f"'{where}.arguments' must be a string.", f"{where}.arguments", "invalid_type")
    return {"name": raw["name"], "arguments": arguments}


def _text(raw: dict[str, Any], name: str, where: str) -> str | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"'{where}.{name}' must be a string.", f"{where}.{name}", "invalid_type")
    return value


def _content(content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"'{where}' must be a string or a list of content parts.", where, "invalid_type")
    if len(content) > MAX_PARTS:
        raise bad_request(f"'{where}' has {len(content)} parts; at most {MAX_PARTS} are allowed.", where)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise bad_request(f"'{where}[{i}]' must be an object.", f"{where}[{i}]", "invalid_type")
        if role in source.ROLES and source.is_picture(part):
            parts.append(part)
            continue
        kind = part.get("type")
        if kind != "text" and not (kind == "refusal" and role == "assistant"):
            raise unsupported(f"{where}[{i}].type", f"Content of type {shorten(kind)!r}")
        if not isinstance(part.get(kind), str):
            raise bad_request(f"'{where}[{i}].{kind}' must be a string.", f"{where}[{i}].{kind}", "invalid_type")
        parts.append({"type": "text", "text": part[kind]})
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
