"""POST /v1/messages, Anthropic's API: what a request may hold, and the chat that it stands for."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Required

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import TypedDict

from ...errors import bad_request, shorten, unsupported
from ...generation.prompt import SWITCHES
from ...wire import fields
from ...wire.requests import ChatRequest
from ..as_chat import Names, SamplingFields, chat_request, objects, speaking_of, string
from .blocks import chat_messages, system_text

# How a chat's fields are called here.
NAMES: Names = (
    (r"messages(\[\d+\][\w.\[\]]*)?", "messages"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"response_format\.json_schema", "output_config.format"),
    (r"response_format", "output_config.format"),
    (r"stop\b", "stop_sequences"),
    (r"reasoning_effort", "output_config.effort"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
)


# Types of tools that Anthropic has made: each has a date.
_SERVER_TOOL = re.compile(r"[a-z0-9_]+_\d{8}|mcp_toolset")


# The shapes, for the OpenAPI document.
class TextBlock(TypedDict, total=False):
    type: Required[Literal["text"]]
    text: Required[str]
    cache_control: dict[str, Any] | None  # accepted: equal prefixes are always shared


class ThinkingBlock(TypedDict, total=False):
    type: Required[Literal["thinking"]]
    thinking: Required[str]
    signature: str


class ToolUseBlock(TypedDict, total=False):
    type: Required[Literal["tool_use"]]
    id: Required[str]
    name: Required[str]
    input: Required[dict[str, Any]]


class ImageSource(TypedDict, total=False):
    type: Required[Literal["base64", "url"]]
    media_type: str  # with base64: image/png, image/jpeg, image/webp or image/gif
    data: str
    url: str  # with url


class ImageBlock(TypedDict, total=False):
    """In messages of users and in results of tools, where the model sees pictures. Else it is refused in messages, and
    a line of text in results."""

    type: Required[Literal["image"]]
    source: Required[ImageSource]


class OtherBlock(TypedDict, total=False):
    """Becomes a line of text in its place. Documents may have a text as their source."""

    type: Required[
        Literal[
            "document", "search_result", "tool_reference", "container_upload", "server_tool_use",
            "mcp_tool_use", "mcp_tool_result", "web_search_tool_result", "web_fetch_tool_result",
            "code_execution_tool_result", "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result", "tool_search_tool_result",
        ]
    ]  # fmt: skip


class ToolResultBlock(TypedDict, total=False):
    type: Required[Literal["tool_result"]]
    tool_use_id: Required[str]
    content: str | list[TextBlock | ImageBlock | OtherBlock] | None
    is_error: bool


class MessageParam(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock] | None


class ServerTool(TypedDict, total=False):
    """Left out, and named in x-vserve-ignored-params."""

    type: Required[str]  # web_search_20250305, …
    name: str


class Tool(TypedDict, total=False):
    type: Literal["custom"] | None
    name: Required[str]
    description: str
    input_schema: Required[dict[str, Any]]
    strict: bool


class ToolChoice(TypedDict, total=False):
    type: Required[Literal["auto", "any", "tool", "none"]]
    name: str  # with tool
    disable_parallel_tool_use: bool


class Format(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["enabled", "adaptive", "disabled"] = Field(description="adaptive: enabled, without a budget")
    budget_tokens: int | None = Field(None, ge=1, description="tokens of thinking, after which it is ended")
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: leave the thinking out")


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    effort: str | None = Field(None, max_length=32, description="for templates that know it")
    format: Format | None = Field(None, description="a JSON schema that the text follows")

    @field_validator("format", mode="plain", json_schema_input_type=Format | None)
    @classmethod
    def _format(cls, value: Any) -> Any:
        if value is not None and (not isinstance(value, dict) or value.get("type") != "json_schema"):
            name = "output_config.format"
            raise bad_request(f"'{name}' must be an object of type json_schema.", name)
        return value


class Conversation(SamplingFields):
    """What a message and the counting of its tokens share."""

    not_built: ClassVar = {"container": (), "mcp_servers": ([],)}

    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    messages: list[dict[str, Any]] = Field(description="the conversation so far")
    system: str | list[dict[str, Any]] | None = Field(None, description="a system message")
    tools: list[dict[str, Any]] | None = Field(None, description="functions that the model may call")
    tool_choice: dict[str, Any] | None = Field(None, description="whether a tool is called, and which (default auto)")
    thinking: Thinking | None = Field(None, description="whether the model thinks first (default: it does not)")
    output_config: OutputConfig | None = Field(None, description="the form of the output, and how much to think")

    @field_validator("messages", mode="plain", json_schema_input_type=list[MessageParam])
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        if not objects(value, "messages"):
            raise bad_request("'messages' must not be empty.", "messages", "empty_array")
        return value

    @field_validator("system", mode="plain", json_schema_input_type=str | list[TextBlock] | None)
    @classmethod
    def _system(cls, value: Any) -> Any:
        return value

    @field_validator("tools", mode="plain", json_schema_input_type=list[Tool | ServerTool] | None)
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]] | None:
        for i, tool in enumerate(() if value is None else objects(value, "tools")):
            if not _is_function(tool):
                if not isinstance(kind := tool["type"], str) or not _SERVER_TOOL.fullmatch(kind):
                    raise unsupported(f"tools[{i}].type", f"A tool of type {shorten(kind)!r}")
                continue
            if tool.get("input_schema") is None:
                param = f"tools[{i}].input_schema"
                raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
        return value

    @field_validator("tool_choice", mode="plain", json_schema_input_type=ToolChoice | None)
    @classmethod
    def _tool_choice(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, dict):
            raise bad_request("'tool_choice' must be an object.", "tool_choice", "invalid_type")
        return value

    def chat(self, **more: Any) -> ChatRequest:
        """Raises ApiError (400) in terms of this request."""
        system = system_text(self.system)
        messages = chat_messages(self.messages, self.leave_out, self._sees)
        offered = self._offered()
        if system:
            messages.insert(0, {"role": "system", "content": system})
        final = messages[-1]
        continues = final["role"] == "assistant" and "tool_calls" not in final
        with speaking_of(NAMES):
            return chat_request(
                {
                    **self.sampling,
                    "model": self.model,
                    "messages": messages,
                    "continue_final_message": continues or None,
                    "tools": offered or None,
                    **self._choice(offered),
                    **self._thinking(),
                    **self._output(),
                    **more,
                }
            )

    def _offered(self) -> list[dict[str, Any]]:
        functions = []
        for tool in self.tools or ():
            if not _is_function(tool):
                self.leave_out(f"tools.{tool['type']}")
                continue
            function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
            functions.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
        return functions

    def _choice(self, offered: list[dict[str, Any]]) -> dict[str, Any]:
        given = self.tool_choice
        if given is None:
            return {}
        kind = given.get("type")
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        if kind == "tool":
            choice: Any = {"type": "function", "function": {"name": string(given, "name", "tool_choice")}}
        elif kind in kinds:
            choice = kinds[kind]
        else:
            raise bad_request(
                f"'tool_choice.type' must be auto, any, tool or none, but it is {shorten(kind)!r}.", "tool_choice.type"
            )
        if not offered and choice in ("auto", "none"):
            choice = None
        single = given.get("disable_parallel_tool_use")
        if single is not None and not isinstance(single, bool):
            name = "tool_choice.disable_parallel_tool_use"
            raise bad_request(f"'{name}' must be a boolean.", name, "invalid_type")
        return {"tool_choice": choice, "parallel_tool_calls": None if single is None else not single}

    def _thinking(self) -> dict[str, Any]:
        """A client that does not ask for thinking may not expect it before the text."""
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        variables = {"enable_thinking": thinks, **(self.chat_template_kwargs or {})}
        fields: dict[str, Any] = {
            "chat_template_kwargs": variables,
            "include_reasoning": any(variables.get(name) for name in SWITCHES),
        }
        if self.thinking is not None and self.thinking.display == "omitted":
            fields["include_reasoning"] = False
        if self.thinking is not None and self.thinking.type == "enabled":
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        return fields

    def _output(self) -> dict[str, Any]:
        if self.output_config is None:
            return {}
        format = self.output_config.format
        schema = None if format is None else {"type": "json_schema", "json_schema": {"schema": format.get("schema")}}
        return {"reasoning_effort": self.output_config.effort, "response_format": schema}


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


class CountRequest(Conversation):
    pass


class MessagesRequest(Conversation):
    max_tokens: int = Field(ge=1, description="most tokens to generate, if the model's context has room for them")
    stream: bool | None = Field(None, description="answer as server-sent events")
    stop_sequences: list[str] | None = Field(None, description="text that ends the answer")
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token each time")
    top_p: float | None = Field(None, gt=0, le=1, description="sample from the likeliest tokens of this total weight")
    metadata: dict[str, Any] | None = Field(None, description="the client's own labels")
    service_tier: str | None = Field(None, max_length=32, description="accepted")
    cache_control: dict[str, Any] | None = Field(None, description="accepted: equal prefixes are always shared")

    @field_validator("stop_sequences", mode="plain", json_schema_input_type=list[str] | None)
    @classmethod
    def _stop_sequences(cls, value: Any) -> list[str] | None:
        return fields.strings(value, "stop_sequences", "a list of strings", fields.MAX_STOPS)

    @model_validator(mode="after")
    def _agree(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            name = "thinking.budget_tokens"
            raise bad_request(f"'{name}' is {budget}; it must be below 'max_tokens', which is {self.max_tokens}.", name)
        return self

    def chat(self, **more: Any) -> ChatRequest:
        """Without `max_tokens`: what the context has no room for is no error here."""
        fields = {
            "stream": self.stream,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        return super().chat(**fields, **more)
