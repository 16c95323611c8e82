"""What /v2/chat answers, for the OpenAPI document alone: handlers encode it by hand. A test compares the two."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from ...wire.answers import Schema

FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR", "TIMEOUT"]


class TextContent(Schema):
    type: Literal["text"]
    text: str


class ThinkingContent(Schema):
    type: Literal["thinking"]
    thinking: str


class CohereFunction(Schema):
    name: str
    arguments: str = Field(description="JSON")


class CohereToolCall(Schema):
    id: str
    type: Literal["function"]
    function: CohereFunction


class CohereMessage(Schema):
    role: Literal["assistant"]
    content: list[TextContent | ThinkingContent] | None = None
    tool_calls: list[CohereToolCall] | None = None


class CohereTokens(Schema):
    input_tokens: int
    output_tokens: int


class CohereUsage(Schema):
    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int = Field(description="taken from the prefix cache")


class CohereLogprobs(Schema):
    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereChat(Schema):
    id: str
    finish_reason: FinishReason
    message: CohereMessage
    usage: CohereUsage
    logprobs: list[CohereLogprobs] | None = Field(None, description="one a token, where they were asked for")


class CohereEnding(Schema):
    finish_reason: FinishReason
    usage: CohereUsage
    error: str | None = None


class CohereBegun(Schema):
    type: Literal["message-start"]
    id: str
    delta: dict[str, Any]


class CohereBlock(Schema):
    type: Literal["content-start", "content-delta", "tool-call-start", "tool-call-delta"]
    index: int
    delta: dict[str, Any] = Field(description="message.content or message.tool_calls: what there is more of it")
    logprobs: CohereLogprobs | None = None


class CohereBlockEnd(Schema):
    type: Literal["content-end", "tool-call-end"]
    index: int


class CohereEnded(Schema):
    type: Literal["message-end"]
    id: str
    delta: CohereEnding


class CohereEvent(RootModel[CohereBegun | CohereBlock | CohereBlockEnd | CohereEnded]):
    """One event of a streamed chat. Each has a line `event:` with its type, too."""
