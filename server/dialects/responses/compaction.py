"""A conversation in short: what POST /v1/responses/compact asks the model for, and the item that carries the answer."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

import msgspec

from ...errors import bad_request
from ..as_chat import string, with_line_between

VERSION = 1
PROMPT = (
    "Sum up this conversation until here, so that somebody can go on with it who has only your summary and the user's "
    "messages, which are kept word for word. Keep what was answered, decided and found out, and why; names, numbers, "
    "paths and code that may be needed again; which tools were called, and what they returned; rules that you were "
    "given; and what is still to be done. Do not repeat the user's messages, do not go on with the conversation, and "
    "write nothing but the summary."
)
_READ_BACK = "The conversation until here, in short:\n\n"


class _Version(msgspec.Struct):
    version: int


class _Carried(_Version):
    """Nothing is made of what else there may be: nobody has counted it."""

    sha256: str
    summary: str

    @property
    def said(self) -> str:
        if self.sha256 != _digest(self.summary):
            raise ValueError("the digest is another")
        return self.summary


def compacted(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation, and the request for a summary: part of the last message where that is the user's, since some
    templates want the roles to alternate."""
    last = messages[-1]
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": PROMPT}]
    return [*messages[:-1], {**last, "content": with_line_between([last["content"], PROMPT])}]


def user_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in items if item["type"] == "message" and item["role"] == "user"]


def compaction_item(id: str, summary: str) -> dict[str, Any]:
    """Readable for whoever has it: it is the client's own conversation. The digest finds what was damaged on the way,
    and is no signature."""
    content = msgspec.json.encode({"version": VERSION, "sha256": _digest(summary), "summary": summary})
    return {"type": "compaction", "id": id, "encrypted_content": base64.urlsafe_b64encode(content).decode()}


def compaction_message(item: dict[str, Any], place: str) -> dict[str, Any]:
    """What the model sees of such an item. Raises ApiError (400) for one that this server did not write."""
    where = f"{place}.encrypted_content"
    remedy = "send the item as /v1/responses/compact gave it, or the conversation itself."
    try:
        text = base64.urlsafe_b64decode(string(item, "encrypted_content", place))
        version = msgspec.json.decode(text, type=_Version).version
        summary = "" if version != VERSION else msgspec.json.decode(text, type=_Carried).said
    except (binascii.Error, ValueError, RecursionError):
        raise bad_request(f"'{where}' is damaged, or not from this server: {remedy}", where) from None
    if version != VERSION:
        raise bad_request(
            f"'{where}' has another version than {VERSION}, which is what this server reads: {remedy}", where
        )
    return {"role": "assistant", "content": _READ_BACK + summary}


def _digest(summary: str) -> str:
    return hashlib.sha256(summary.encode()).hexdigest()
