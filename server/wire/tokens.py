"""The requests of the endpoints around tokens, and of cancelling."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..errors import bad_request
from ..grammar import tools
from ..grammar.tools import ToolDefinition
from ..text import conversation
from ..text.conversation import Message
from . import fields

MAX_TOKENS = 1 << 20  # of one text; more than any context


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())


class TokenizeRequest(_Request):
    """Either a prompt, or messages and what the chat template needs."""

    model: str | None = Field(None, description="a name that the server serves")
    prompt: str | None = Field(None, description="text")
    messages: list[dict[str, Any]] | None = Field(None, description="a conversation, rendered by the chat template")
    add_special_tokens: bool | None = Field(
        None, description="with the tokenizer's special tokens (default: true for a prompt, false for messages)"
    )
    return_token_strs: bool | None = Field(None, description="the text of each token, too")
    add_generation_prompt: bool | None = Field(None, description="end the prompt where the assistant begins to speak")
    continue_final_message: bool | None = Field(None, description="leave the last message open")
    documents: list[dict[str, Any]] | None = Field(None, description="for templates that know them")
    chat_template: str | None = Field(None, description="a Jinja template; only with --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the chat template")
    reasoning_effort: str | None = Field(None, max_length=32, description="for templates that know it")
    tools: list[dict[str, Any]] | None = Field(None, description="functions that the model may call")

    @field_validator("messages", mode="plain", json_schema_input_type=list[Message] | None)
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]] | None:
        return None if value is None else conversation.messages(value)

    @field_validator("tools", mode="plain", json_schema_input_type=list[ToolDefinition] | None)
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]] | None:
        return tools.definitions(value)

    @field_validator("documents", mode="plain", json_schema_input_type=list[dict[str, Any]] | None)
    @classmethod
    def _documents(cls, value: Any) -> list[dict[str, Any]] | None:
        return fields.documents(value)

    @model_validator(mode="after")
    def _agrees(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Give either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
        if self.continue_final_message and self.add_generation_prompt:
            name = "add_generation_prompt"
            raise bad_request(f"'{name}' must be false when 'continue_final_message' is true.", name)
        return self


class DetokenizeRequest(_Request):
    model: str | None = Field(None, description="a name that the server serves")
    tokens: list[int] = Field(description="token ids", fail_fast=True)
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text (default false)")

    @field_validator("tokens", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MAX_TOKENS:
            raise bad_request(
                f"'tokens' has {len(value)} entries; at most {MAX_TOKENS} are allowed: send several requests.", "tokens"
            )
        return value


class AbortRequest(_Request):
    request_id: str = Field(
        min_length=1, max_length=1024, description="the header x-request-id of the request's answer, or the answer's id"
    )
