"""What /v1/responses answers, for the OpenAPI document alone: handlers encode it by hand. A test compares the two."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from ...wire.answers import Schema, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Schema):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] = Field(description="empty")
    logprobs: list[TokenLogprob] = Field(description="with include or top_logprobs")


class ReasoningText(Schema):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Schema):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Schema):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[dict[str, Any]] = Field(description="empty: the reasoning itself is the content")
    content: list[ReasoningText]
    encrypted_content: None


class OutputFunctionCall(Schema):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str = Field(description="for the item of type function_call_output that answers it")
    name: str
    namespace: str | None = Field(None, description="where the function is one of a namespace")
    arguments: str = Field(description="JSON")


class OutputCustomToolCall(Schema):
    type: Literal["custom_tool_call"]
    id: str
    status: Status
    call_id: str = Field(description="for the item of type custom_tool_call_output that answers it")
    name: str
    namespace: str | None = Field(None, description="where the tool is one of a namespace")
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomToolCall


class InputTokensDetails(Schema):
    cached_tokens: int = Field(description="taken from the prefix cache")
    cache_write_tokens: int


class OutputTokensDetails(Schema):
    reasoning_tokens: int


class ResponseUsage(Schema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Schema):
    code: str
    message: str


class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(Schema):
    effort: str | None
    summary: str | None


class TextSettings(Schema):
    format: dict[str, Any]
    verbosity: str | None


class ConversationRef(Schema):
    id: str


class ResponseObject(Schema):
    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time")
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationRef | None = Field(None, description="where the request names one")
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: None
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Schema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


# ---- events ----


class Numbered(Schema):
    sequence_number: int = Field(description="0, 1, 2, …")


class AboutResponse(Numbered):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class AboutItem(Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class InItem(Numbered):
    item_id: str
    output_index: int


class AboutPart(InItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(InItem):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(InItem):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ListedItem(BaseModel):
    """As the request had it; messages with parts."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str
    status: Literal["in_progress", "completed", "incomplete"]


class InputItems(Schema):
    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Schema):
    object: Literal["response.input_tokens"]
    input_tokens: int


class UserMessage(BaseModel):
    """As the request had it, with parts."""

    model_config = ConfigDict(extra="allow")

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["user"]
    content: list[dict[str, Any]] = Field(description="parts: input_text")


class CompactionItem(Schema):
    type: Literal["compaction"]
    id: str
    encrypted_content: str = Field(description="the summary, for an input of /v1/responses: base64, and no secret")


class CompactedResponse(Schema):
    id: str
    object: Literal["response.compaction"]
    created_at: int = Field(description="Unix time")
    output: list[UserMessage | CompactionItem] = Field(description="the user's messages, then the summary")
    usage: ResponseUsage


class ReasoningDelta(InItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(InItem):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(InItem):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(InItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ErrorEvent(Numbered):
    type: Literal["error"]
    code: str
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        AboutResponse
        | AboutItem
        | AboutPart
        | TextDelta
        | TextDone
        | ReasoningDelta
        | ReasoningDone
        | ArgumentsDelta
        | ArgumentsDone
        | CustomInputDelta
        | CustomInputDone
        | ErrorEvent
    ]
):
    """One event of a streamed response. Each has a line `event:` with its type, too."""
