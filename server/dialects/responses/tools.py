"""The tools of a response as the functions of a chat, and what their calls are in its output.

A chat has functions alone. One of a namespace has the namespace's name before its own; a custom tool, whose input is
text, is a function with one argument; what runs on OpenAI's servers, or is built into its models, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import bad_request, shorten, unsupported
from ...grammar.tools import MAX_NAME, MAX_TOOLS
from ..as_chat import objects, string

SEPARATOR = "__"  # between a namespace and the name of its function: templates and grammars know names of such letters
INPUT = "input"  # the argument of a custom tool
_SCHEMA = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Called:
    """How the call of a function stands in the output."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True)
class Offer:
    functions: list[dict[str, Any]] = field(default_factory=list)  # as a chat's tools have them, under `function`
    called: dict[str, Called] = field(default_factory=dict)  # those that a chat calls by another name or kind
    left_out: dict[str, None] = field(default_factory=dict)  # types, in their order

    @staticmethod
    def of(tools: list[dict[str, Any]] | None) -> Offer:
        """Raises ApiError (400)."""
        offer = Offer()
        for i, tool in enumerate(objects(tools or [], "tools", MAX_TOOLS)):
            offer._add(tool, f"tools[{i}]", None)
        return offer

    def _add(self, tool: dict[str, Any], where: str, namespace: str | None) -> None:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise unsupported(f"{where}.type", f"A tool of type {shorten(kind)!r}")
        if kind == "namespace" and namespace is None:
            name, inner = string(tool, "name", where), objects(tool.get("tools"), f"{where}.tools", MAX_TOOLS)
            if len(name) > MAX_NAME:  # before each function gets a name with a copy of it
                raise bad_request(f"'{where}.name' is longer than {MAX_NAME} characters.", f"{where}.name")
            for i, function in enumerate(inner):
                # What is said of all of them stands once, where the model reads of the first.
                shared = tool.get("description") if i == 0 else None
                self._add(_described(function, shared, name), f"{where}.tools[{i}]", name)
        elif kind in ("function", "custom"):
            if len(self.functions) == MAX_TOOLS:
                raise bad_request(f"'tools' has more than {MAX_TOOLS} functions, with those of namespaces.", "tools")
            function = _custom(tool, where) if kind == "custom" else {k: tool[k] for k in _FIELDS if k in tool}
            if namespace is not None or kind == "custom":
                name = string(tool, "name", where)
                function["name"] = in_chat(name, namespace)
                self.called[function["name"]] = Called(name, namespace, kind == "custom")
            self.functions.append({name: value for name, value in function.items() if value is not None})
        else:
            self.left_out[kind] = None

    def choice(self, choice: Any) -> Any:
        """The field "tool_choice" as a chat has it. Raises ApiError (400)."""
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind in ("function", "custom"):
                choice = _named(_name(choice, "tool_choice"))
            elif kind == "allowed_tools":
                names = list(dict.fromkeys(self._allowed(choice.get("tools"))))
                mode = choice.get("mode", "auto")
                if not names and mode == "auto":
                    return "none" if self.functions else None  # only tools that are left out
                choice = {"type": kind, kind: {"mode": mode, "tools": [_named(name) for name in names]}}
            else:
                raise unsupported("tool_choice.type", f"'tool_choice' of type {shorten(kind)!r}")
        return None if not self.functions and choice in ("auto", "none") else choice

    def _allowed(self, tools: Any) -> Iterator[str]:
        """Names, as a chat has them, of the functions that are allowed. All of a namespace come once, however often it
        is named."""
        where = "tool_choice.tools"
        offered = {name for function in self.functions if isinstance(name := function.get("name"), str)}
        members: dict[str | None, list[str]] = {}
        for name, called in self.called.items():
            members.setdefault(called.namespace, []).append(name)
        seen: set[str] = set()
        for i, tool in enumerate(objects(tools, where, MAX_TOOLS)):
            kind = tool.get("type")
            if isinstance(kind, str) and kind in self.left_out:
                continue
            if kind == "namespace":
                namespace = string(tool, "name", f"{where}[{i}]")
                if namespace in seen:
                    continue
                seen.add(namespace)
                names = members.get(namespace, [])
            else:
                namespace = _name(tool, f"{where}[{i}]")
                names = [namespace] if namespace in offered else []
            if not names:
                raise bad_request(f"'{where}' names {shorten(namespace)!r}, which 'tools' does not have.", where)
            yield from names


def in_chat(name: str, namespace: Any) -> str:
    return f"{namespace}{SEPARATOR}{name}" if isinstance(namespace, str) and namespace else name


def call_of_text(text: str) -> str:
    """The arguments of a custom tool's function."""
    return msgspec.json.encode({INPUT: text}).decode()


class InputText:
    """The input of a custom tool, as the arguments of its function come: JSON with one text in it. What is none is
    the input as it is."""

    def __init__(self) -> None:
        self._pieces: list[str] = []  # of the arguments, while nothing of the input has come
        self._num_come = 0  # characters of these
        self._held = ""  # of an escape that is not whole
        self._is_open = self._is_whole = False

    def feed(self, text: str) -> str:
        """More of the input."""
        if self._is_whole:
            return ""
        if not self._is_open:
            self._pieces.append(text)
            self._num_come += len(text)
            if '"' not in text or self._num_come > _MAX_BEGUN + len(text):
                return ""
            found = _BEGUN.match(text := "".join(self._pieces))
            if found is None:
                return ""
            self._is_open, text = True, text[found.end() :]
        text = self._held + text
        inside = _INSIDE.match(text)
        assert inside is not None  # it may be empty
        self._held = text[inside.end() :]
        self._is_whole = self._held.startswith('"')
        try:
            return str(msgspec.json.decode(f'"{inside[0]}"'))
        except msgspec.DecodeError:  # a surrogate without the other
            return inside[0]

    def finish(self) -> str:
        """What of it is left."""
        if self._is_open:
            return ""
        arguments = "".join(self._pieces)
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return arguments
        text = value.get(INPUT) if isinstance(value, dict) else None
        return text if isinstance(text, str) else arguments


_MAX_BEGUN = 256  # characters before the input; where there are more it is read when it is whole
_BEGUN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Characters and whole escapes; the first of two surrogates only with the second.
_INSIDE = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r'|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\["\\/bfnrt])*'
)


def _name(tool: dict[str, Any], where: str) -> str:
    return in_chat(string(tool, "name", where), tool.get("namespace"))


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _described(function: dict[str, Any], shared: Any, namespace: str) -> dict[str, Any]:
    if not isinstance(shared, str) or not shared:
        return function
    own = function.get("description")
    more = own if isinstance(own, str) else ""
    return {**function, "description": f"{more}\n(Of all in {namespace}: {shared})".lstrip()}


def _custom(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function whose argument is text. Whether that follows a grammar is up to the model, which reads it."""
    format, description = tool.get("format"), tool.get("description")
    if description is not None and not isinstance(description, str):
        raise bad_request(f"'{where}.description' must be a string.", f"{where}.description", "invalid_type")
    if format is not None and not isinstance(format, dict):
        raise bad_request(f"'{where}.format' must be an object.", f"{where}.format", "invalid_type")
    if format is not None and format.get("type") == "grammar":
        definition, syntax = string(format, "definition", f"{where}.format"), format.get("syntax")
        description = f"{description or ''}\n'{INPUT}' follows this grammar ({syntax}):\n{definition}".lstrip()
    return {"description": description, "parameters": _SCHEMA}
