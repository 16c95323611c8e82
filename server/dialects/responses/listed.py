"""The items that a response was made of, as its clients list them."""

from __future__ import annotations

from typing import Any

_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "compaction": "cmp",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def input_items(value: str | list[dict[str, Any]], response_id: str, first: int) -> list[dict[str, Any]]:
    """Of the field "input", once it has been read: each with an id, by its place, and messages with parts. `first`:
    the place of the first one.
    """
    items: list[dict[str, Any]] = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [_item(item, response_id.removeprefix("resp_"), first + i) for i, item in enumerate(items)]


def _item(item: dict[str, Any], response: str, place: int) -> dict[str, Any]:
    kind = item.get("type") or "message"
    prefix = _PREFIXES.get(kind, "item")
    shown = {**item, "type": kind, "id": f"{prefix}_{response}_in{place}", "status": "completed"}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": content}]
    return shown
