"""The body of /v1/chat/completions/batch: several chats that are asked for alike."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from ..errors import bad_request
from ..text import conversation
from ..text.conversation import Message
from .requests import ChatRequest

# What an answer with one choice a conversation has no place for.
_ALONE = ("stream", "tools", "store", "continue_final_message", "echo", "prompt_logprobs")


class ChatBatch(ChatRequest):
    messages: list[list[dict[str, Any]]] = Field(  # type: ignore[assignment]
        description="the conversations; each gets the choice of its index"
    )

    @field_validator("messages", mode="plain", json_schema_input_type=list[list[Message]])
    @classmethod
    def _messages(cls, value: Any) -> Any:
        return conversation.conversations(value)

    @model_validator(mode="after")
    def _one_choice_each(self) -> ChatBatch:
        for name in _ALONE:
            if getattr(self, name):
                raise bad_request(
                    f"'{name}' is not for several conversations: ask /v1/chat/completions for each.", name
                )
        if (self.n or 1) > 1:
            raise bad_request("'n' must be 1: each conversation gets one choice.", "n")
        return self
