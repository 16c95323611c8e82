"""POST /v2/chat, Cohere's API: what a request may hold, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Required

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import TypedDict

from ...errors import bad_request, shorten, unsupported
from ...wire import fields
from ...wire.requests import ChatRequest
from ..as_chat import MAX_PARTS, Names, SamplingFields, chat_request, objects, part_text, string, text_of

# How a chat's fields are called here.
NAMES: Names = (
    (r"top_p", "p"),
    (r"top_k", "k"),
    (r"stop\b", "stop_sequences"),
    (r"response_format\.json_schema\.schema", "response_format.json_schema"),
    (r"thinking_token_budget", "thinking.token_budget"),
)
_TEXT = {"text": "text"}
_NO_CITATIONS = ("off", "disabled")


# The shapes, for the OpenAPI document.
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingPart(TypedDict):
    type: Literal["thinking"]
    thinking: str


class Document(TypedDict, total=False):
    data: Required[str | dict[str, Any]]
    id: str | None


class DocumentPart(TypedDict):
    """In results of tools."""

    type: Literal["document"]
    document: Document


class Function(TypedDict, total=False):
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None


class Tool(TypedDict):
    type: Literal["function"]
    function: Function


class CalledFunction(TypedDict):
    name: str
    arguments: str  # JSON


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict, total=False):
    role: Required[Literal["user", "assistant", "system", "tool"]]
    content: str | list[TextPart | ThinkingPart | DocumentPart] | None
    tool_calls: list[ToolCall] | None
    tool_plan: str | None
    tool_call_id: str


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["enabled", "disabled"] = Field(description="whether the model thinks first")
    token_budget: int | None = Field(None, ge=1, description="tokens of thinking, after which it is ended")


class CitationOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    mode: str | None = Field(None, max_length=32, description="there are no citations: other than off is ignored")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = Field(None, description="which the JSON follows")


class CohereChatRequest(SamplingFields):
    not_built: ClassVar = {"raw_prompting": (False,)}

    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    messages: list[dict[str, Any]] = Field(description="the conversation so far")
    stream: bool | None = Field(None, description="answer as server-sent events")
    tools: list[dict[str, Any]] | None = Field(None, description="functions that the model may call")
    strict_tools: bool | None = Field(None, description="arguments follow the schemas of the tools in any case")
    tool_choice: Literal["REQUIRED", "NONE"] | None = Field(
        None, description="whether a tool is called (default: may be)"
    )
    documents: list[Any] | None = Field(None, description="for templates that know them")
    citation_options: CitationOptions | None = Field(None, description="answers have no citations")
    response_format: ResponseFormat | None = Field(None, description="JSON, or what a JSON schema allows")
    safety_mode: str | None = Field(None, max_length=32, description="other than OFF and NONE: ignored")
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    stop_sequences: list[str] | None = Field(None, description="text that ends the answer")
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token each time")
    p: float | None = Field(None, description="sample from the likeliest tokens of this total weight; 0: from all")
    k: int | None = Field(None, ge=0, description="sample from so many tokens; 0: from all")
    logprobs: bool | None = Field(None, description="log-probabilities of the answer's tokens")
    thinking: Thinking | None = Field(None, description="whether the model thinks first (default: as it is used to)")

    @field_validator("messages", mode="plain", json_schema_input_type=list[Message])
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        if not objects(value, "messages"):
            raise bad_request("'messages' must not be empty.", "messages", "empty_array")
        return value

    @field_validator("tools", mode="plain", json_schema_input_type=list[Tool] | None)
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]] | None:
        return None if value is None else objects(value, "tools")  # read by the chat

    @field_validator("documents", mode="plain", json_schema_input_type=list[str | Document] | None)
    @classmethod
    def _documents(cls, value: Any) -> list[Any] | None:
        if value is not None and (not isinstance(value, list) or len(value) > MAX_PARTS):
            raise bad_request(f"'documents' must be a list of at most {MAX_PARTS} documents.", "documents")
        return value

    @field_validator("stop_sequences", mode="plain", json_schema_input_type=list[str] | None)
    @classmethod
    def _stop_sequences(cls, value: Any) -> list[str] | None:
        return fields.strings(value, "stop_sequences", "a list of strings", fields.MAX_STOPS)

    @model_validator(mode="after")
    def _agree(self) -> CohereChatRequest:
        if self.tool_choice == "REQUIRED" and not self.tools:
            raise bad_request("'tool_choice' REQUIRED needs 'tools'.", "tool_choice")
        return self

    def chat(self) -> ChatRequest:
        """Raises ApiError (400) in terms of this request."""
        cites = self.citation_options is not None and (self.citation_options.mode or "").lower() not in _NO_CITATIONS
        if cites:
            self.leave_out("citation_options")
        if self.safety_mode not in (None, "OFF", "NONE"):
            self.leave_out("safety_mode")
        return chat_request(
            {
                **self.sampling,
                "model": self.model,
                "messages": [self._message(message, f"messages[{i}]") for i, message in enumerate(self.messages)],
                "stream": self.stream,
                "tools": [self._tool(tool) for tool in self.tools or ()] or None,
                "tool_choice": {"REQUIRED": "required", "NONE": "none"}[self.tool_choice]
                if self.tool_choice is not None and self.tools else None,
                "documents": [_document(one, f"documents[{i}]") for i, one in enumerate(self.documents or ())] or None,
                "max_completion_tokens": self.max_tokens,
                "stop": self.stop_sequences,
                "temperature": self.temperature,
                "top_p": 1.0 if self.p == 0 else self.p,
                **({} if self.k is None else {"top_k": self.k}),
                "logprobs": self.logprobs or None,
                "top_logprobs": 0 if self.logprobs else None,
                "response_format": self._response_format(),
                **self._thinking(),
            }
        )  # fmt: skip

    def _message(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        role, content = message.get("role"), message.get("content")
        if role in ("user", "system", "developer"):
            return {"role": role, "content": text_of(content, f"{where}.content", _TEXT)}
        if role == "tool":
            return {
                "role": "tool", "tool_call_id": string(message, "tool_call_id", where),
                "content": _result("" if content is None else content, f"{where}.content"),
            }  # fmt: skip
        if role != "assistant":
            param = f"{where}.role"
            raise bad_request(f"'{param}' must be user, assistant, system or tool, not {shorten(role)!r}.", param)
        said: dict[str, Any] = {"role": "assistant"}
        thoughts, texts = _spoken(content, f"{where}.content")
        if (plan := message.get("tool_plan")) is not None:
            thoughts.append(string({"tool_plan": plan}, "tool_plan", where))
        if thoughts:
            said["reasoning"] = "\n".join(thoughts)
        if message.get("tool_calls"):
            said["tool_calls"] = message["tool_calls"]
        if texts or "tool_calls" not in said:
            said["content"] = "\n".join(texts)
        return said

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function")
        if self.strict_tools and isinstance(function, dict):
            return {**tool, "function": {**function, "strict": True}}
        return tool

    def _response_format(self) -> dict[str, Any] | None:
        format = self.response_format
        if format is None or format.type == "text":
            return None
        if format.json_schema is None:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format.json_schema}}

    def _thinking(self) -> dict[str, Any]:
        if self.thinking is None:
            return {}
        thinks = self.thinking.type == "enabled"
        variables = {"enable_thinking": thinks, **(self.chat_template_kwargs or {})}
        budget = {"thinking_token_budget": self.thinking.token_budget} if thinks else {"include_reasoning": False}
        return {"chat_template_kwargs": variables, **budget}


def _spoken(content: Any, where: str) -> tuple[list[str], list[str]]:
    """(thoughts, texts) of an assistant's message."""
    if content is None or isinstance(content, str):
        return [], [content] if content else []
    thoughts: list[str] = []
    texts: list[str] = []
    for i, part in enumerate(objects(content, where, MAX_PARTS)):
        if part.get("type") == "thinking":
            thoughts.append(string(part, "thinking", f"{where}[{i}]"))
        else:
            texts.append(part_text(part, f"{where}[{i}]", _TEXT))
    return thoughts, texts


def _result(content: Any, where: str) -> str:
    """Of a tool: documents are JSON, one a line."""
    if isinstance(content, str):
        return content
    lines = []
    for i, part in enumerate(objects(content, where, MAX_PARTS)):
        place = f"{where}[{i}]"
        if part.get("type") == "document":
            document = _document(part.get("document"), f"{place}.document")
            is_text = document.keys() == {"text"} and isinstance(document["text"], str)
            lines.append(document["text"] if is_text else _json(document, place))
        else:
            lines.append(part_text(part, place, _TEXT))
    return "\n".join(lines)


def _document(value: Any, where: str) -> dict[str, Any]:
    """As chat templates take it. Raises ApiError (400)."""
    data, id = (value.get("data"), value.get("id")) if isinstance(value, dict) else (value, None)
    if isinstance(data, str):
        data = {"text": data}
    if not isinstance(data, Mapping):
        raise unsupported(where, f"'{where}' that is neither a text nor an object with 'data'")
    return {**data} if id is None else {"id": id, **data}


def _json(value: Any, place: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise bad_request(f"'{place}' is nested too deeply.", place) from None
