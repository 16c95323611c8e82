"""The tools of a chat request: what it offers, which it demands, and what the answer must then look like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Required

import msgspec
from typing_extensions import TypedDict

from .constraint import Constraint
from .errors import bad_request, shorten, unsupported
from .json_schema import Schema, SchemaError
from .parsers.formats import Grammar, ToolFormat
from .structured import too_deep

MAX_TOOLS = 1024
MAX_NAME = 128  # characters
MAX_DEFINITION = 256 << 10  # characters of one tool's JSON
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*")
ANY_OBJECT = '{"type":"object"}'


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


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class Tool:
    name: str
    schema: str  # of its arguments, as JSON
    strict: bool


@dataclass(frozen=True)
class ToolUse:
    """How the tools of a request may be used."""

    definitions: list[dict[str, Any]]  # as the chat template gets them
    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "named"] = "auto"
    name: str | None = None  # of the tool that must be called
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.name in (None, tool.name))

    def constraints(self, format: ToolFormat, content: Constraint | None) -> list[Constraint]:
        """What to constrain the answer by: the first that can be compiled. `content`: what text must look like."""
        schema = None
        if content is not None and self.mode == "auto":
            schema = ANY_OBJECT if content.kind == "json_object" else content.text
        return list(_constraints(format, self.callable, self.mode, self.parallel, schema))


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
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in (tool.name for tool in offered):
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


# ---- what the answer must look like ----


@lru_cache(maxsize=128)  # agents send the same tools with each request
def _constraints(
    format: ToolFormat, tools: tuple[Tool, ...], mode: str, parallel: bool, content: str | None
) -> tuple[Constraint, ...]:
    exact = {tool.name: tool.schema if tool.strict or _can_be_followed(tool.schema) else ANY_OBJECT for tool in tools}
    loose = {tool.name: tool.schema if tool.strict else ANY_OBJECT for tool in tools}
    attempts = [exact] if exact == loose else [exact, loose]
    return tuple(_constraint(format, schemas, mode, parallel, content) for schemas in attempts)


@lru_cache(maxsize=1024)
def _can_be_followed(schema: str) -> bool:
    """Only strict tools are refused for a schema that has something beyond the grammars."""
    try:
        return Schema(msgspec.json.decode(schema)).obstacle is None
    except (SchemaError, RecursionError):
        return False


def _constraint(
    format: ToolFormat, schemas: dict[str, str], mode: str, parallel: bool, content: str | None
) -> Constraint:
    calls: dict[str, Grammar] = {}  # what follows the beginning of a call
    for name, schema in schemas.items():
        calls[name] = _sequence(format.arguments(msgspec.json.decode(schema)), _const(format.end))
    rest: list[Grammar] = []  # what may follow a call
    if parallel and (mode != "auto" or content is not None or format.opening):
        whole = _any([_sequence(_const(format.begin(name)), call) for name, call in calls.items()])
        rest = [{"type": "star", "content": _sequence(_const(format.separator), whole)}]
    rest.append(_const(format.closing))
    begun = {name: format.opening + format.begin(name) for name in calls}
    if mode != "auto" or content is not None:
        called = _any([_sequence(_const(begun[name]), call, *rest) for name, call in calls.items()])
        grammar = called if content is None else _any([called, _json(content)])
    else:
        rules: dict[str, list[Grammar]] = {}  # after what triggers it
        for name, call in calls.items():
            trigger = format.trigger or begun[name]
            rules.setdefault(trigger, []).append(_sequence(_const(begun[name].removeprefix(trigger)), call, *rest))
        loop = parallel and not format.opening
        grammar = {"type": "dispatch", "rules": [[text, _any(found)] for text, found in rules.items()], "loop": loop}
    tag = {"type": "structural_tag", "format": grammar}
    return Constraint("structural_tag", msgspec.json.encode(tag).decode(), markers=bool(format.markers))


def _json(schema: str) -> Grammar:
    return {"type": "json_schema", "json_schema": msgspec.json.decode(schema)}


def _const(text: str) -> Grammar:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Grammar) -> Grammar:
    real = [element for element in elements if element != _const("")]
    return real[0] if len(real) == 1 else {"type": "sequence", "elements": real}


def _any(elements: list[Grammar]) -> Grammar:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
