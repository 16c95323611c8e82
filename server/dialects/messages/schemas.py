"""What /v1/messages answers, for the OpenAPI document alone: handlers encode it by hand. A test compares the two."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from ...wire.answers import Schema

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(Schema):
    type: Literal["text"]
    text: str


class ThinkingContent(Schema):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="for clients that want one; not checked when it comes back")


class ToolUseContent(Schema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(Schema):
    thinking_tokens: int


class MessageUsage(Schema):
    input_tokens: int = Field(description="without those from the cache")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="taken from the prefix cache")
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageObject(Schema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None = Field(description="null only in message_start")
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Schema):
    input_tokens: int


class AnthropicErrorDetail(Schema):
    type: str
    message: str = Field(description="one sentence for a person")


class AnthropicError(Schema):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


# ---- events ----


class MessageStart(Schema):
    type: Literal["message_start"]
    message: MessageObject


class Ping(Schema):
    type: Literal["ping"]


class BlockStart(Schema):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextOfBlock(Schema):
    type: Literal["text_delta"]
    text: str


class ThinkingOfBlock(Schema):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureOfBlock(Schema):
    type: Literal["signature_delta"]
    signature: str


class InputOfBlock(Schema):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Schema):
    type: Literal["content_block_delta"]
    index: int
    delta: TextOfBlock | ThinkingOfBlock | SignatureOfBlock | InputOfBlock


class BlockStop(Schema):
    type: Literal["content_block_stop"]
    index: int


class Ending(Schema):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Schema):
    type: Literal["message_delta"]
    delta: Ending
    usage: MessageUsage


class MessageStop(Schema):
    type: Literal["message_stop"]


class MessageEvent(RootModel[MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop]):
    """One event of a streamed message. Each has a line `event:` with its type, too."""
