"""What routing looks at in a request: its model, and the text whose beginning a server may have in its cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..client.routing import Keys, prefix_keys

# In the order in which chat templates write them; what is no text is compared as its JSON.
_TEXTS = (
    "tools", "system", "instructions", "messages", "prompt", "input", "query", "documents", "text_1", "text_2", "texts",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    model: str | None = None
    text: bytes = b""
    keys: Keys = field(default_factory=list)  # of the text; with the model and `cache_salt`, which share nothing
    session: str | None = None  # requests of one session go to one server
    ids: tuple[str, ...] = field(default=())  # what it goes on from or is about: only who made that knows it


@dataclass
class Ask:
    """A request on its way over Ray Serve (ray_serve.py), as routing sees it. The front says when its answer begins: it
    has the router in its process."""

    asked: Asked
    num_tokens: int
    begun: bool = False


def read(body: bytes) -> Asked:
    """Whatever is wrong with a body is for the server to say."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked()
    if not isinstance(content, dict):
        return Asked()
    parts = [content[name] for name in _TEXTS if content.get(name)]
    model, salt = _text(content.get("model")), _text(content.get("cache_salt"))
    named = (_text(content.get(name)) for name in ("previous_response_id", "request_id"))
    text = b"".join(map(msgspec.json.encode, parts))
    return Asked(model or None, text, prefix_keys(text, f"{model}\0{salt}"), ids=tuple(filter(None, named)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
