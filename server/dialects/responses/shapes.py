"""What the free parts of a response's request may hold: items, tools, formats. For the OpenAPI document alone."""

from __future__ import annotations

from typing import Any, Literal, Required

from typing_extensions import TypedDict


class InputText(TypedDict, total=False):
    type: Required[Literal["input_text", "output_text"]]
    text: Required[str]


class InputImage(TypedDict, total=False):
    """Where the model sees pictures. Else it is refused in messages, and a line of text in the results of tools."""

    type: Required[Literal["input_image"]]
    image_url: Required[str]  # https, http, or data:image/…;base64,
    detail: Literal["auto", "low", "high", "original"]


class InputMessage(TypedDict, total=False):
    type: Literal["message"]
    role: Required[Literal["system", "developer", "user", "assistant"]]
    content: Required[str | list[InputText | InputImage]]


class FunctionCallItem(TypedDict, total=False):
    type: Required[Literal["function_call"]]
    call_id: Required[str]
    name: Required[str]
    namespace: str | None
    arguments: Required[str]  # JSON


class FunctionCallOutputItem(TypedDict, total=False):
    type: Required[Literal["function_call_output"]]
    call_id: Required[str]
    output: Required[str | list[InputText | InputImage]]


class CustomToolCallItem(TypedDict, total=False):
    type: Required[Literal["custom_tool_call"]]
    call_id: Required[str]
    name: Required[str]
    namespace: str | None
    input: Required[str]


class CustomToolCallOutputItem(TypedDict, total=False):
    type: Required[Literal["custom_tool_call_output"]]
    call_id: Required[str]
    output: Required[str | list[InputText | InputImage]]


class BuiltInItem(TypedDict, total=False):
    """What became of tools that are not here: the model reads it as text, or as a call and its result."""

    type: Required[
        Literal[
            "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
            "apply_patch_call_output", "computer_call", "computer_call_output", "tool_search_call",
            "tool_search_output", "web_search_call", "file_search_call", "code_interpreter_call",
            "image_generation_call", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
        ]
    ]  # fmt: skip


class ThoughtPart(TypedDict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(TypedDict, total=False):
    type: Required[Literal["reasoning"]]
    content: list[ThoughtPart] | None
    summary: list[ThoughtPart]


class CompactionInput(TypedDict, total=False):
    type: Required[Literal["compaction"]]
    encrypted_content: Required[str]  # as /v1/responses/compact gave it


InputItem = (
    InputMessage
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | BuiltInItem
    | ReasoningItem
    | CompactionInput
)


class FunctionTool(TypedDict, total=False):
    type: Required[Literal["function"]]
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None  # a JSON schema
    strict: bool | None


class CustomFormat(TypedDict, total=False):
    """A grammar stands in the description that the model reads; nothing holds it to that."""

    type: Required[Literal["text", "grammar"]]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(TypedDict, total=False):
    type: Required[Literal["custom"]]
    name: Required[str]
    description: str | None
    format: CustomFormat | None


class NamespaceTool(TypedDict, total=False):
    type: Required[Literal["namespace"]]
    name: Required[str]
    description: str | None
    tools: Required[list[FunctionTool | CustomTool]]


class BuiltInTool(TypedDict, total=False):
    """Left out, and named in x-vserve-ignored-params."""

    type: Required[str]  # web_search, local_shell, …


Tool = FunctionTool | CustomTool | NamespaceTool | BuiltInTool


class NamedTool(TypedDict, total=False):
    type: Required[Literal["function", "custom"]]
    name: Required[str]
    namespace: str | None


class AllowedTools(TypedDict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool | BuiltInTool]


class TextFormat(TypedDict, total=False):
    type: Required[Literal["text", "json_object", "json_schema"]]
    name: str
    schema: dict[str, Any]
    strict: bool | None
    description: str | None
