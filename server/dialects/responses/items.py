"""The items of a response's input and output as the messages of a chat."""

from __future__ import annotations

from typing import Any

from ...errors import bad_request, shorten, unsupported
from ..as_chat import objects, string, text_of
from .compaction import compaction_message

ROLES = ("system", "developer", "user", "assistant")
_SPOKEN = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_RESULT = {"input_text": "text", "output_text": "text", "text": "text"}
_THOUGHT = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


def input_messages(value: Any) -> list[dict[str, Any]]:
    """Of the field "input", a string or items. Raises ApiError (400)."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad_request("'input' must be a string or a list of items.", "input", "invalid_type")
    return item_messages(objects(value, "input"), "input")


def item_messages(items: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        place = f"{where}[{i}]"
        if kind == "message":
            _message(messages, item, place)
        elif kind == "reasoning":
            thought = text_of(item.get("content") or item.get("summary") or "", f"{place}.content", _THOUGHT)
            if thought:
                messages.append({"role": "assistant", "reasoning": thought})
        elif kind == "function_call":
            function = {"name": string(item, "name", place), "arguments": string(item, "arguments", place)}
            call = {"id": string(item, "call_id", place), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = text_of(item.get("output"), f"{place}.output", _RESULT)
            messages.append({"role": "tool", "tool_call_id": string(item, "call_id", place), "content": content})
        elif kind == "compaction":
            _join_users(messages)
            messages.append(compaction_message(item, place))
        elif kind == "item_reference":
            raise unsupported(f"{place}.type", "An item_reference (send the item itself, or previous_response_id)")
        else:
            raise unsupported(f"{place}.type", f"An item of type {shorten(kind)!r}")
    return messages


def _message(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise bad_request(
            f"'{place}.role' must be one of {', '.join(ROLES)}, but it is {shorten(role)!r}.", f"{place}.role"
        )
    content = text_of(item.get("content"), f"{place}.content", _SPOKEN)
    if role == "assistant":
        _assistant(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _join_users(messages: list[dict[str, Any]]) -> None:
    """Those at the end become one, as no answers are left between them: some templates want the roles to alternate."""
    first = len(messages)
    while first and messages[first - 1]["role"] == "user":
        first -= 1
    if users := messages[first:]:
        messages[first:] = [{"role": "user", "content": "\n\n".join(message["content"] for message in users)}]


def _assistant(messages: list[dict[str, Any]], *without: str) -> dict[str, Any]:
    """The assistant's message that an item goes on with: the last one, unless it has one of these."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]
