"""/v1/conversations: what is asked and told, and a conversation as it is stored."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from ...wire import fields
from ...wire.answers import Schema
from ...wire.encoded import encode
from ..as_chat import objects
from ..pieces import Pieces
from ..store import Stored
from .items import item_messages
from .listed import input_items
from .shapes import InputItem


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    _left_out: dict[str, None] = PrivateAttr(default_factory=dict)

    def leave_out(self, name: str) -> None:
        self._left_out[name] = None

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows, and of contents that a model is told of as a line of text."""
        return [*(self.model_extra or ()), *self._left_out]


class ConversationUpdate(_Body):
    metadata: dict[str, str] | None = Field(description="the client's own labels, in place of those that it has")

    @field_validator("metadata", mode="after")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return fields.metadata(value)


class NewItems(_Body):
    items: list[dict[str, Any]] = Field(description="what was said before, as in the input of /v1/responses")

    @field_validator("items", mode="plain", json_schema_input_type=list[InputItem])
    @classmethod
    def _items(cls, value: Any) -> list[dict[str, Any]]:
        return objects(value, "items")

    def read(self, sees: bool) -> tuple[Pieces, list[dict[str, Any]]]:
        """The messages of a chat that they are, and the items as they are listed. `sees`: pictures are parts of the
        messages. Raises ApiError (400)."""
        items = self.items or []
        messages = Pieces.of(item_messages(items, "items", self.leave_out, sees))
        return messages, input_items(items, uuid.uuid4().hex, 0)


class NewConversation(NewItems):
    items: list[dict[str, Any]] | None = Field(  # type: ignore[assignment]
        None, description="what was said before, as in the input of /v1/responses"
    )
    metadata: dict[str, str] | None = Field(None, description="the client's own labels")

    @field_validator("items", mode="plain", json_schema_input_type=list[InputItem] | None)
    @classmethod
    def _items(cls, value: Any) -> list[dict[str, Any]]:
        return [] if value is None else objects(value, "items")

    @field_validator("metadata", mode="after")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return fields.metadata(value)


def conversation(id: str, created: int, body: NewConversation, sees: bool) -> Stored:
    """Raises ApiError (400)."""
    messages, items = body.read(sees)
    answer = {"id": id, "object": "conversation", "created_at": created, "metadata": body.metadata or {}}
    return Stored.of(answer, messages, Pieces.of(items))


def without(stored: Stored, item_id: str, sees: bool) -> Stored | None:
    """The conversation without this item; None where it has none of this id. Takes as long as it is large."""
    items = list(stored.items.entries())
    left = [item for item in items if item["id"] != item_id]
    if len(left) == len(items):
        return None
    messages = item_messages(left, "items", lambda name: None, sees)  # which a lone result of a tool is, too
    return replace(stored, messages=Pieces.of(messages), items=Pieces.of(left))


def listed(items: list[dict[str, Any]]) -> bytes:
    """Of items that were added, what tells of them."""
    ids = [item["id"] for item in items]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return bytes(encode({"object": "list", "data": items, **ends, "has_more": False}))


# ---- answers, for the OpenAPI document ----
class Conversation(Schema):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Schema):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
