"""POST /v1/responses: what a request may hold, and the chat that it stands for."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ...errors import bad_request, shorten, unsupported
from ...wire import fields
from ...wire.requests import ChatRequest
from ..as_chat import Names, SamplingFields, chat_request, objects, speaking_of
from .items import input_messages
from .shapes import AllowedTools, InputItem, NamedTool, TextFormat, Tool
from .tools import Offer

# How a chat's fields are called here.
NAMES: Names = (
    (r"messages(\[\d+\][\w.\[\]]*)?", "input"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"reasoning_effort", "reasoning.effort"),
)
_LOGPROBS = "message.output_text.logprobs"
# The second asks for what a client needs to send reasoning back: here the text itself does.
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: TextFormat | None = Field(None, description="JSON, or what a JSON schema allows")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="other than medium: ignored, and named in the header"
    )

    @field_validator("format", mode="plain", json_schema_input_type=TextFormat | None)
    @classmethod
    def _format(cls, value: Any) -> Any:
        return value  # read together with a chat's


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    effort: str | None = Field(None, max_length=32, description="for templates that know it; none: no reasoning")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="accepted: the reasoning itself is in the answer, and no summary"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="older name of summary")


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_obfuscation: bool | None = Field(None, description="accepted; no padding is added")


class ResponsesRequest(SamplingFields):
    not_built: ClassVar = {
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "prompt": (),
    }

    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    input: str | list[dict[str, Any]] = Field(description="text, or the items of a conversation")
    instructions: str | None = Field(None, description="a system message before the input; for this response only")
    previous_response_id: str | None = Field(
        None, max_length=256, description="of a stored response: the conversation goes on from there"
    )
    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_options: ResponseStreamOptions | None = Field(None, description="how to stream")
    background: bool | None = Field(None, description="answer at once, and run without the client")
    store: bool | None = Field(None, description="keep the response for GET and previous_response_id (default true)")
    max_output_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    max_tool_calls: int | None = Field(None, ge=0, description="accepted: it limits built-in tools, which are not here")
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token each time")
    top_p: float | None = Field(None, gt=0, le=1, description="sample from the likeliest tokens of this total weight")
    top_logprobs: int | None = Field(None, ge=0, description="log-probabilities of so many of the likeliest tokens")
    stop: list[str] | None = Field(None, description="text that ends the answer")
    thinking_token_budget: int | None = Field(None, description="tokens of reasoning, after which it is ended")
    include: list[str] | None = Field(None, description="message.output_text.logprobs: log-probabilities")
    tools: list[dict[str, Any]] | None = Field(None, description="functions that the model may call")
    tool_choice: Any = Field(None, description="whether a tool is called, and which (default auto)")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most (default true)")
    text: TextOptions | None = Field(None, description="the form of the output")
    reasoning: ReasoningOptions | None = Field(None, description="how much to think")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: where the input is too long, its oldest turns are left out"
    )
    metadata: dict[str, str] | None = Field(None, description="the client's own labels, which the answer repeats")
    user: str | None = Field(None, max_length=1024, description="the client's own label")
    safety_identifier: str | None = Field(None, max_length=1024, description="the client's own label")
    prompt_cache_key: str | None = Field(
        None, max_length=1024, description="accepted: equal prefixes are always shared"
    )
    prompt_cache_retention: str | None = Field(None, max_length=32, description="accepted")
    service_tier: str | None = Field(None, max_length=32, description="accepted")

    @field_validator("input", mode="plain", json_schema_input_type=str | list[InputItem])
    @classmethod
    def _input(cls, value: Any) -> Any:
        return value  # read by `chat`

    @field_validator("stop", mode="plain", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _stop(cls, value: Any) -> Any:
        return value

    @field_validator("tools", mode="plain", json_schema_input_type=list[Tool] | None)
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]] | None:
        return None if value is None else objects(value, "tools")  # read by `offer`

    @field_validator(
        "tool_choice", mode="plain",
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
    )  # fmt: skip
    @classmethod
    def _tool_choice(cls, value: Any) -> Any:
        return value

    @field_validator("include", mode="plain", json_schema_input_type=list[str] | None)
    @classmethod
    def _include(cls, value: Any) -> list[str] | None:
        if value is None:
            return None
        if not isinstance(value, list):
            raise bad_request("'include' must be a list of strings.", "include", "invalid_type")
        for i, name in enumerate(value):
            if name not in _INCLUDABLE:
                raise unsupported(f"include[{i}]", f"'include' of {shorten(name)!r}")
        return value

    @field_validator("metadata", mode="after")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return fields.metadata(value)

    @model_validator(mode="after")
    def _agree(self) -> ResponsesRequest:
        if self.background and not self.stores:
            raise bad_request("'background' needs 'store': its answer is read from there.", "store")
        return self

    @property
    def stores(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def messages(self) -> list[dict[str, Any]]:
        """Of the input alone. Raises ApiError (400)."""
        return input_messages(self.input, self.leave_out, self._sees)

    def chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """`messages`: of the whole conversation. Raises ApiError (400) in terms of this request."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        for kind in self.offer.left_out:
            self.leave_out(f"tools.{kind}")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            self.leave_out("text.verbosity")
        offered = [{"type": "function", "function": function} for function in self.offer.functions]
        reasoning = self.reasoning or ReasoningOptions.model_construct()
        with speaking_of(NAMES):
            return chat_request(
                {
                    **self.sampling,
                    "model": self.model,
                    "messages": [*system, *messages],
                    "stream": self.stream,
                    "max_completion_tokens": self.max_output_tokens,
                    "temperature": self.temperature,
                    "top_p": self.top_p,
                    "stop": self.stop,
                    "logprobs": self.wants_logprobs or None,
                    "top_logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
                    "tools": offered or None,
                    "tool_choice": self.offer.choice(self.tool_choice),
                    "parallel_tool_calls": self.parallel_tool_calls,
                    "response_format": self._response_format(),
                    "reasoning_effort": reasoning.effort,
                    "thinking_token_budget": self.thinking_token_budget,
                }
            )

    @cached_property
    def offer(self) -> Offer:
        """Raises ApiError (400)."""
        return Offer.of(self.tools)

    def _response_format(self) -> Any:
        format = None if self.text is None else self.text.format
        if isinstance(format, dict) and format.get("type") == "json_schema":
            return {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}
        if isinstance(format, dict) and format.get("type") not in ("text", "json_object"):
            raise bad_request(
                f"'text.format.type' must be text, json_object or json_schema, but it is "
                f"{shorten(format.get('type'))!r}.",
                "text.format.type",
            )
        return format
