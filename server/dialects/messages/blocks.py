"""The blocks of Anthropic's messages as the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import bad_request, shorten, unsupported
from ..as_chat import MAX_PARTS, image_part, joined, objects, string, text_of
from .stand_ins import stand_in

# A line that Claude Code writes before its system message. It is another one with each request, so that nothing behind
# it would be found in the prefix cache; it is meant for the billing of Anthropic's own service, and not for a model.
BILLING = "x-anthropic-billing-header:"
_TEXT = {"text": "text"}

LeaveOut = Callable[[str], None]  # hears the name of each kind of content that becomes a line of text


def system_text(value: Any) -> str:
    """Raises ApiError (400)."""
    return "" if value is None else _system(value, "system")


def _system(value: Any, where: str) -> str:
    text = text_of(value, where, _TEXT)
    start = 0
    while text.startswith(BILLING, start):  # there may be many: only the rest behind them is copied
        start = text.find("\n", start) + 1 or len(text)
    return text[start:]


def chat_messages(messages: list[dict[str, Any]], leave_out: LeaveOut, sees: bool = False) -> list[dict[str, Any]]:
    """`sees`: pictures are parts of the chat's messages. Raises ApiError (400)."""
    said: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{i}].content"
        if content is None:
            content = ""
        if role == "assistant":
            said.append(_assistant(content, where, leave_out))
        elif role == "user":
            said += _user(content, where, leave_out, sees)
        elif role == "system":
            said.append({"role": "system", "content": _system(content, where)})
        else:
            param = f"messages[{i}].role"
            raise bad_request(f"'{param}' must be user or assistant, but it is {shorten(role)!r}.", param)
    return said


def _user(content: Any, where: str, leave_out: LeaveOut, sees: bool) -> list[dict[str, Any]]:
    """The results of tools are messages of their own."""
    if not isinstance(content, list):
        return [{"role": "user", "content": text_of(content, where, _TEXT)}]
    messages: list[dict[str, Any]] = []
    parts: list[str | dict[str, Any]] = []
    for i, block in enumerate(objects(content, where, MAX_PARTS)):
        place = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            if parts:
                messages.append({"role": "user", "content": joined(parts)})
                parts = []
            messages.append(_result(block, place, leave_out, sees))
        elif block.get("type") == "image" and sees:
            parts.append(_image(block, place))
        elif block.get("type") == "image":  # whoever shows one asks about it: an answer would be made up
            raise unsupported(f"{place}.type", "Content of type 'image'")
        else:
            parts.append(_text(block, place, leave_out))
    if parts or not messages:
        messages.append({"role": "user", "content": joined(parts)})
    return messages


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    source, place = block.get("source"), f"{where}.source"
    if not isinstance(source, dict):
        raise bad_request(f"'{place}' must be an object.", place, "invalid_type")
    if (kind := source.get("type")) == "base64":
        return image_part(f"data:{string(source, 'media_type', place)};base64,{string(source, 'data', place)}")
    if kind == "url":
        return image_part(string(source, "url", place))
    raise unsupported(f"{place}.type", f"A picture whose source is of type {shorten(kind)!r}")


def _result(block: dict[str, Any], where: str, leave_out: LeaveOut, sees: bool) -> dict[str, Any]:
    content, place = block.get("content"), f"{where}.content"
    parts: list[str | dict[str, Any]] = []
    if isinstance(content, list):
        for i, part in enumerate(objects(content, place, MAX_PARTS)):
            seen = sees and part.get("type") == "image"
            parts.append(_image(part, f"{place}[{i}]") if seen else _text(part, f"{place}[{i}]", leave_out))
    else:
        parts.append("" if content is None else text_of(content, place, _TEXT))
    if block.get("is_error"):  # templates have no other way to say so
        first = parts[0] if parts and isinstance(parts[0], str) else None
        parts = ["Error: " if first is None else f"Error: {first}", *parts[first is not None :]]
    return {"role": "tool", "tool_call_id": string(block, "tool_use_id", where), "content": joined(parts)}


def _assistant(content: Any, where: str, leave_out: LeaveOut) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    if not isinstance(content, list):
        return {**message, "content": text_of(content, where, _TEXT)}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(objects(content, where, MAX_PARTS)):
        place = f"{where}[{i}]"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(string(block, "thinking", place))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise bad_request(f"'{place}.input' must be an object.", f"{place}.input", "invalid_type")
            function = {"name": string(block, "name", place), "arguments": msgspec.json.encode(arguments).decode()}
            calls.append({"id": string(block, "id", place), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # which nobody here can read
            texts.append(_text(block, place, leave_out))
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if any(thoughts):
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: dict[str, Any], where: str, leave_out: LeaveOut) -> str:
    """Its text, or what stands in its place."""
    if block.get("type") == "text":
        return string(block, "text", where)
    text = stand_in(block)
    if text is None:
        raise unsupported(f"{where}.type", f"Content of type {shorten(block.get('type'))!r}")
    leave_out(f"messages.{block['type']}")
    return text
