"""The tools of a chat request: what it offers, which it demands, and what the answer must then look like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, Required

import msgspec
from typing_extensions import TypedDict

from ..errors import bad_request, shorten, unsupported
from ..parsers.formats import ToolFormat
from .constraint import Constraint
from .structured import too_deep
from .tool_calls import ANY_OBJECT, Tool, constraints

MAX_TOOLS = 1024
MAX_NAME = 128  # characters
MAX_DEFINITION = 256 << 10  # characters of one tool's JSON
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*")


# The shapes, for the OpenAPI document.
class FunctionDefinition(TypedDict, total=False):
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None  # a JSON schema
    strict: bool | None  # refuse schemas that cannot be followed to the letter


class ToolDefinition(TypedDict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(TypedDict):
    name: str


class NamedTool(TypedDict):
    type: Literal["function"]
    function: FunctionName


class AllowedSet(TypedDict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(TypedDict):
    """The model reads of all tools, so that the prompt stays the same, and may call these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


@dataclass(frozen=True)
class ToolUse:
    """How the tools of a request may be used."""

    definitions: list[dict[str, Any]]  # as the chat template gets them
    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "named"] = "auto"
    name: str | None = None  # of the tool that must be called
    parallel: bool = True
    allowed: frozenset[str] | None = None  # names of those that may be called; None: all

    @property
    def callable(self) -> tuple[Tool, ...]:
        allowed = self.allowed
        return tuple(
            tool for tool in self.tools if self.name in (None, tool.name) and (allowed is None or tool.name in allowed)
        )

    @property
    def size(self) -> int:
        """Characters of the schemas of those that may be called."""
        return sum(len(tool.schema) for tool in self.callable)

    def constraints(self, format: ToolFormat, content: Constraint | None) -> list[Constraint]:
        """What to constrain the answer by: the first that can be compiled. `content`: what text must look like."""
        schema = None
        if content is not None and self.mode == "auto":
            schema = ANY_OBJECT if content.kind == "json_object" else content.text
        return list(constraints(format, self.callable, self.mode, self.parallel, schema))


def definitions(value: Any) -> list[dict[str, Any]] | None:
    """The field "tools", checked. Raises ApiError (400)."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_request("'tools' must be a list of tools.", "tools", "invalid_type")
    if not value:
        raise bad_request("'tools' must not be empty; leave it out instead.", "tools", "empty_array")
    if len(value) > MAX_TOOLS:
        raise bad_request(f"'tools' has {len(value)} entries; at most {MAX_TOOLS} are allowed.", "tools")
    names = set()
    for i, tool in enumerate(value):
        name = _check(tool, f"tools[{i}]")
        if name in names:
            raise bad_request(f"'tools' has two with the name {name!r}; rename one.", f"tools[{i}].function.name")
        names.add(name)
    return value


def _check(tool: Any, where: str) -> str:
    if not isinstance(tool, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", f"A tool of type {shorten(tool.get('type'))!r}")
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    name = function.get("name")
    if name is None:
        raise bad_request(f"Missing required parameter: '{where}.name'.", f"{where}.name", "missing_required_parameter")
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise bad_request(
            f"'{where}.name' is {shorten(name)!r}; it must have 1 to {MAX_NAME} letters, digits, and _ . : / -.",
            f"{where}.name",
        )
    for field, kind, what in (("description", str, "a string"), ("strict", bool, "a boolean")):
        if function.get(field) is not None and not isinstance(function[field], kind):
            raise bad_request(f"'{where}.{field}' must be {what}.", f"{where}.{field}", "invalid_type")
    schema = function.get("parameters")
    if schema is not None and (not isinstance(schema, dict) or schema.get("type", "object") != "object"):
        raise bad_request(
            f"'{where}.parameters' must be a JSON schema of type object.", f"{where}.parameters", "invalid_type"
        )
    return name


def choice(value: Any) -> Any:
    """The field "tool_choice", checked for its form. Raises ApiError (400)."""
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type", "function") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return value
        raise bad_request(
            "'tool_choice.function.name' must be the name of a tool.", "tool_choice.function.name", "invalid_type"
        )
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        where, allowed = "tool_choice.allowed_tools", value.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
            raise bad_request(f"'{where}.mode' must be auto or required.", f"{where}.mode")
        tools = allowed.get("tools")
        if not isinstance(tools, list) or not tools:
            message = f"'{where}.tools' must be a list of tools, and not empty: for none there is 'tool_choice' none."
            raise bad_request(message, f"{where}.tools", "invalid_type")
        for i, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                name = f"{where}.tools[{i}].function.name"
                raise bad_request(f"'{name}' must be the name of a tool.", name, "invalid_type")
        return value
    if isinstance(value, dict):
        raise unsupported("tool_choice.type", f"'tool_choice' of type {shorten(value.get('type'))!r}")
    raise bad_request(
        f"'tool_choice' is {shorten(value)!r}; it must be none, auto, required, or an object that names a function.",
        "tool_choice",
    )


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """None where no tool may be called. Raises ApiError (400) where the fields do not agree."""
    if choice == "none":
        return None
    if tools is None:
        if choice is not None:
            raise bad_request("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
        return None
    offered = tuple(_tool(tool["function"], f"tools[{i}].function.parameters") for i, tool in enumerate(tools))
    many = parallel is not False
    names = {tool.name for tool in offered}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice["allowed_tools"]
        wanted = frozenset(tool["function"]["name"] for tool in allowed["tools"])
        if unknown := sorted(wanted - names):
            where = "tool_choice.allowed_tools.tools"
            raise bad_request(f"'{where}' names {shorten(unknown[0])!r}, which 'tools' does not have.", where)
        return ToolUse(tools, offered, allowed["mode"], parallel=many, allowed=wanted)
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in names:
            raise bad_request(
                f"'tool_choice' names {shorten(name)!r}, which 'tools' does not have.", "tool_choice.function.name"
            )
        return ToolUse(tools, offered, "named", name, parallel=False)
    return ToolUse(tools, offered, choice or "auto", parallel=many)


def _tool(function: dict[str, Any], where: str) -> Tool:
    schema = function.get("parameters") or {}
    try:
        text = msgspec.json.encode({"type": "object", **schema}).decode()
    except RecursionError:
        raise too_deep(where) from None
    if len(text) > MAX_DEFINITION:
        raise bad_request(f"'{where}' has {len(text)} characters; at most {MAX_DEFINITION} are allowed.", where)
    return Tool(function["name"], text, bool(function.get("strict")))
