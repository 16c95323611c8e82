"""The blocks of Anthropic's messages as the messages of a chat."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import bad_request, shorten, unsupported
from ..as_chat import MAX_PARTS, objects, string, text_of

_TEXT = {"text": "text"}


def system_text(value: Any) -> str:
    """Raises ApiError (400)."""
    return "" if value is None else text_of(value, "system", _TEXT)


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ApiError (400)."""
    said: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{i}].content"
        if role == "assistant":
            said.append(_assistant(content, where))
        elif role == "user":
            said += _user(content, where)
        elif role == "system":
            said.append({"role": "system", "content": text_of(content, where, _TEXT)})
        else:
            param = f"messages[{i}].role"
            raise bad_request(f"'{param}' must be user or assistant, but it is {shorten(role)!r}.", param)
    return said


def _user(content: Any, where: str) -> list[dict[str, Any]]:
    """The results of tools are messages of their own."""
    if not isinstance(content, list):
        return [{"role": "user", "content": text_of(content, where, _TEXT)}]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for i, block in enumerate(objects(content, where, MAX_PARTS)):
        if block.get("type") == "tool_result":
            if texts:
                messages.append({"role": "user", "content": "\n".join(texts)})
                texts = []
            messages.append(_result(block, f"{where}[{i}]"))
        else:
            texts.append(_block(block, f"{where}[{i}]", "text"))
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else text_of(content, f"{where}.content", _TEXT)
    if block.get("is_error"):
        text = f"Error: {text}"  # templates have no other way to say so
    return {"role": "tool", "tool_call_id": string(block, "tool_use_id", where), "content": text}


def _assistant(content: Any, where: str) -> dict[str, Any]:
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
            texts.append(_block(block, place, "text"))
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _block(block: dict[str, Any], where: str, kind: str) -> str:
    if block.get("type") != kind:
        raise unsupported(f"{where}.type", f"Content of type {shorten(block.get('type'))!r}")
    return string(block, kind, where)
