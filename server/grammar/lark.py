"""Grammars of tool calls in llguidance's language. xgrammar's form of them grows with the square of their schemas: five
tools of five parameters take 6 MB with 150,000 tokens, and 200 take the engine seconds to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..parsers.formats import Grammar
from .json_schema import Schema

MAX_WHITESPACE = 40  # characters in a row: weak models go on for ever otherwise
# Escapes that can write one key in two ways would get round what its schema says.
JSON_OPTIONS: dict[str, Any] = {"json_allowed_escapes": 'nrbtf\\"'}
TEXT = "TEXT: /(?s:.*)/"


def between_tokens(whitespace: str) -> dict[str, Any]:
    """How JSON is written with white space between its tokens that matches this regular expression."""
    return JSON_OPTIONS | {"whitespace_flexible": True, "whitespace_pattern": whitespace}


def whitespace(most: int = MAX_WHITESPACE) -> str:
    return rf"[\x20\x0A\x0D\x09]{{1,{most}}}"


def lark(format: Grammar, arguments: Mapping[str, Grammar]) -> str:
    """The text of a grammar. Its elements are some of xgrammar's structural tags (const_string, sequence, or, star,
    json_schema), and

    - list: content, and any number of it after a separator
    - keywords: sign and value of each required property, and of any others, in their order, with separators
    - arguments: those `of` a tool
    - dispatch: any text; each trigger in it begins what its rule says, and `then` follows; `loop`: text may, too.

    `arguments`: by the tools' names. Raises SchemaError.
    """
    return _Writer(arguments).write(format)


class _Writer:
    def __init__(self, arguments: Mapping[str, Grammar]) -> None:
        self._arguments = arguments
        self._written: dict[str, str] = {}  # tool → the rule of its arguments
        self._rules: dict[str, str] = {}  # what one says → its name: what comes twice is written once

    def write(self, grammar: Grammar) -> str:
        start = self._expression(grammar)
        return "\n".join([f"start: {start}", TEXT, *(f"{name}: {said}" for said, name in self._rules.items())])

    def _rule(self, said: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        return self._rules.setdefault(said, name + attribute).removesuffix(attribute)

    def _expression(self, grammar: Grammar) -> str:
        match grammar["type"]:
            case "const_string":
                return json.dumps(grammar["value"])
            case "sequence":
                return " ".join(map(self._expression, grammar["elements"]))
            case "or":
                return f"({' | '.join(map(self._expression, grammar['elements']))})"
            case "star":
                return f"({self._expression(grammar['content'])})*"
            case "list":
                one = self._rule(self._expression(grammar["content"]))
                return f"{one} ({json.dumps(grammar['separator'])} {one})*"
            case "json_schema":
                return self._json(grammar["json_schema"], grammar.get("max_whitespace_cnt", MAX_WHITESPACE))
            case "keywords":
                return self._keywords(grammar)
            case "arguments":
                return self._arguments_of(grammar["of"])
            case "dispatch":
                return self._dispatch(grammar)
        raise AssertionError(grammar["type"])

    def _arguments_of(self, tool: str) -> str:
        if tool not in self._written:  # reading a schema changes it
            self._written[tool] = self._rule(self._expression(self._arguments[tool]))
        return self._written[tool]

    def _json(self, schema: Any, most: int) -> str:
        """`most`: characters of white space in a row."""
        options = {"x-guidance": between_tokens(whitespace(most))}
        return self._rule(f"%json {json.dumps(Schema(schema).root | options)}")

    def _keywords(self, grammar: Grammar) -> str:
        separator, required = json.dumps(grammar["separator"]), grammar["required"]
        said = {
            name: f"{json.dumps(name + grammar['sign'])} {self._json(schema, grammar['max_whitespace_cnt'])}"
            for name, schema in grammar["properties"].items()
        }
        rest, beginnings = "", []
        for name in [name for name in reversed(said) if name not in required]:
            beginnings.append(f"{said[name]} {rest}")
            rest = self._rule(f"({separator} {said[name]})? {rest}")
        if not required:
            return f"({' | '.join(beginnings)})?" if beginnings else '""'
        return f" {separator} ".join(said[name] for name in said if name in required) + f" {rest}"

    def _dispatch(self, grammar: Grammar) -> str:
        """Any text, in which each trigger begins what its rule says; `loop`: text may follow again."""
        calls = []
        for trigger, following in grammar["rules"]:
            head = self._rule(f"TEXT {json.dumps(trigger)}", "[lazy]")  # it ends where the trigger first does
            calls.append(f"{head} {self._expression(following)}")
        call = self._rule(f"({' | '.join(calls)}) {self._expression(grammar['then'])}")
        return f"{call}* TEXT" if grammar["loop"] else f"({call} | TEXT)"
