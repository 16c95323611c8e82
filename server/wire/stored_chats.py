"""What is asked and told of stored chats."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from . import fields
from .answers import ChatCompletion, Schema


class ChatUpdate(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    metadata: dict[str, str] | None = Field(description="the client's own labels, in place of those that it has")

    @field_validator("metadata", mode="after")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return fields.metadata(value)

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())


# ---- answers, for the OpenAPI document ----
class StoredChat(ChatCompletion):
    metadata: dict[str, str]


class StoredChats(Schema):
    object: Literal["list"]
    data: list[StoredChat]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedChat(Schema):
    object: Literal["chat.completion.deleted"]
    id: str
    deleted: Literal[True]


class StoredMessage(BaseModel):
    """As the request had it."""

    model_config = ConfigDict(extra="allow")

    id: str
    role: str
    content_parts: list[dict[str, Any]] | None = Field(None, description="null: content has the text")


class StoredMessages(Schema):
    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool
