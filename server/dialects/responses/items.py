"""The items of a response's input and output as the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import bad_request, shorten, unsupported
from ..as_chat import MAX_PARTS, image_part, joined, objects, part_text, string, text_of, with_line_between
from .compaction import compaction_message
from .tools import call_of_text, in_chat

ROLES = ("system", "developer", "user", "assistant")
_SPOKEN = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_RESULT = {"input_text": "text", "output_text": "text", "text": "text"}
# Results may have what is no text: to refuse it would end the client's session, which sends it again each time.
_UNSEEN = {
    "input_image": "[A picture was here. You cannot see pictures.]",
    "input_file": "[A file was here. You cannot read it.]",
}
# Items of tools that this server has none of, and that are in the history of a conversation held elsewhere.
_RUN_BY_CLIENTS = frozenset((
    "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
    "apply_patch_call_output", "computer_call", "computer_call_output", "tool_search_call", "tool_search_output",
))  # fmt: skip
_RUN_ELSEWHERE = frozenset((
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
))  # fmt: skip
_ABOUT_ITEM = ("type", "id", "call_id", "status", "result")  # the last: pictures that were made
MAX_LINE = 1000  # characters of what is said of a tool that ran elsewhere
_THOUGHT = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


LeaveOut = Callable[[str], None]  # hears the name of each kind of content that becomes text


def input_messages(value: Any, leave_out: LeaveOut, sees: bool = False) -> list[dict[str, Any]]:
    """Of the field "input", a string or items. `sees`: pictures are parts of the messages. Raises ApiError (400)."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad_request("'input' must be a string or a list of items.", "input", "invalid_type")
    return item_messages(objects(value, "input"), "input", leave_out, sees)


def item_messages(
    items: list[dict[str, Any]], where: str, leave_out: LeaveOut, sees: bool = False
) -> list[dict[str, Any]]:
    """Reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        place = f"{where}[{i}]"
        if kind == "message":
            _message(messages, item, place, sees)
        elif kind == "reasoning":
            thought = text_of(item.get("content") or item.get("summary") or "", f"{place}.content", _THOUGHT)
            if thought:
                messages.append({"role": "assistant", "reasoning": thought})
        elif kind in ("function_call", "custom_tool_call"):
            is_custom = kind == "custom_tool_call"
            arguments = call_of_text(string(item, "input", place)) if is_custom else string(item, "arguments", place)
            name = in_chat(string(item, "name", place), item.get("namespace"))
            _call(messages, string(item, "call_id", place), name, arguments)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _result(item.get("output"), f"{place}.output", leave_out, sees)
            messages.append({"role": "tool", "tool_call_id": string(item, "call_id", place), "content": content})
        elif kind == "computer_call_output" and sees:
            content = joined([_image(item.get("output"), f"{place}.output")])
            messages.append({"role": "tool", "tool_call_id": string(item, "call_id", place), "content": content})
        elif isinstance(kind, str) and (kind in _RUN_BY_CLIENTS or kind in _RUN_ELSEWHERE):
            leave_out(f"input.{kind}")
            _of_built_in_tool(messages, item, kind, place)
        elif kind == "compaction":
            _join_users(messages)
            messages.append(compaction_message(item, place))
        elif kind == "item_reference":
            raise unsupported(f"{place}.type", "An item_reference (send the item itself, or previous_response_id)")
        else:
            raise unsupported(f"{place}.type", f"An item of type {shorten(kind)!r}")
    return messages


def _call(messages: list[dict[str, Any]], id: str, name: str, arguments: str) -> None:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _result(output: Any, where: str, leave_out: LeaveOut, sees: bool) -> str | list[dict[str, Any]]:
    if not isinstance(output, list):
        return text_of("" if output is None else output, where, _RESULT)
    parts: list[str | dict[str, Any]] = []
    for i, part in enumerate(objects(output, where, MAX_PARTS)):
        if part.get("type") == "input_image" and sees:
            parts.append(_image(part, f"{where}[{i}]"))
        elif (line := _UNSEEN.get(str(part.get("type")))) is not None:
            leave_out(f"input.{part['type']}")
            parts.append(line)
        else:
            parts.append(part_text(part, f"{where}[{i}]", _RESULT))
    return joined(parts)


def _image(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise bad_request(f"'{where}' must be an object with a picture.", where, "invalid_type")
    if part.get("image_url") is None and part.get("file_id") is not None:
        raise unsupported(f"{where}.file_id", "A picture by its 'file_id' (send it as 'image_url', a URL or data URL)")
    return image_part(string(part, "image_url", where), part.get("detail"))


def _of_built_in_tool(messages: list[dict[str, Any]], item: dict[str, Any], kind: str, place: str) -> None:
    """A call and its result where the client has run the tool; else the assistant has said that it was used."""
    more = {name: value for name, value in item.items() if name not in _ABOUT_ITEM and value is not None}
    if kind in _RUN_ELSEWHERE:
        _say(messages, f"[{kind}: {_json(more, place)[:MAX_LINE]}]")
        return
    id = item.get("call_id") or string(item, "id", place)
    if kind.endswith("_call"):
        _call(messages, id, kind.removesuffix("_call"), _json(more.get("action", more), place))
        return
    output = item.get("output")
    content = output if isinstance(output, str) else _json(more, place)
    messages.append({"role": "tool", "tool_call_id": id, "content": content})


def _json(value: Any, place: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise bad_request(f"'{place}' is nested too deeply.", place) from None


def _say(messages: list[dict[str, Any]], line: str) -> None:
    """On a line of its own of what the assistant says."""
    message = _assistant(messages, "tool_calls")
    message["content"] = f"{message['content']}\n{line}" if message.get("content") else line


def _message(messages: list[dict[str, Any]], item: dict[str, Any], place: str, sees: bool) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise bad_request(
            f"'{place}.role' must be one of {', '.join(ROLES)}, but it is {shorten(role)!r}.", f"{place}.role"
        )
    content, where = item.get("content"), f"{place}.content"
    if isinstance(content, list) and sees and role == "user":
        parts = enumerate(objects(content, where, MAX_PARTS))
        content = joined(
            [
                _image(part, f"{where}[{i}]")
                if part.get("type") == "input_image"
                else part_text(part, f"{where}[{i}]", _SPOKEN)
                for i, part in parts
            ]
        )
    else:
        content = text_of("" if content is None else content, where, _SPOKEN)
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
        messages[first:] = [{"role": "user", "content": with_line_between([one["content"] for one in users])}]


def _assistant(messages: list[dict[str, Any]], *without: str) -> dict[str, Any]:
    """The assistant's message that an item goes on with: the last one, unless it has one of these."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]
