"""Text in the place of what a conversation holds beside text: pictures, documents, and what tools of Anthropic's own
servers were asked and have answered. An agent sends its whole history with each request, so that to refuse one block
would end its session; and a model that is told what stood there does not take what was said of it for made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

MAX_CALL = 1000  # characters of what a tool was asked

_UNSEEN = {
    "image": "[A picture was here. You cannot see pictures.]",
    "document": "[A document was here. You cannot read documents of this kind.]",
    "container_upload": "[A file was here. You cannot read it.]",
}
_CALLS = ("server_tool_use", "mcp_tool_use")
_READABLE = ("title", "url", "source", "text", "stdout", "stderr", "tool_name", "error_code", "error_message")


def stand_in(block: dict[str, Any]) -> str | None:
    """For a block that is neither text, thought, nor a call or result of the client's own tools; None: nothing that is
    known here."""
    kind = block.get("type")
    if not isinstance(kind, str):
        return None
    if kind == "tool_reference":
        return f"[The tool {block.get('tool_name')} can be called.]"
    if kind == "search_result" or kind == "document":
        # Documents of other kinds have data that is no text, or lie elsewhere.
        texts = list(_texts(_readable_source(block))) if kind == "document" else list(_texts(block.get("content")))
        title = [name for name in (block.get("title"), block.get("source")) if isinstance(name, str)]
        return "\n".join([*title, *(texts or [_UNSEEN["document"]])])
    if kind in _UNSEEN:
        return _UNSEEN[kind]
    if kind in _CALLS:
        asked = msgspec.json.encode(block.get("input")).decode()[:MAX_CALL]
        return f"[The tool {block.get('name')} was called with {asked}]"
    if kind.endswith("_tool_result"):
        return "\n".join([f"[Its result ({kind.removesuffix('_tool_result')}):]", *_texts(block.get("content"))])
    return None


def _readable_source(document: dict[str, Any]) -> Any:
    source = document.get("source")
    if not isinstance(source, dict):
        return None
    return {"text": source.get("data")} if source.get("type") == "text" else source.get("content")


def _texts(content: Any) -> Iterator[str]:
    """All that can be read in it, in order. The depth is that of the results that there are, and no more."""
    if isinstance(content, str):
        yield content
        return
    for entry in content if isinstance(content, list) else [content]:
        if not isinstance(entry, dict):
            continue
        yield from (text for name in _READABLE if isinstance(text := entry.get(name), str) and text)
        inner = entry.get("content")
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, str):
                yield part
            elif isinstance(part, dict) and isinstance(text := part.get("text"), str):
                yield text
