"""Grammars of tool calls in llguidance's language. xgrammar's form of them grows with the square of their schemas: five
tools of five parameters take 6 MB with 150,000 tokens, and 200 take the engine seconds to read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..parsers.formats import Grammar
from .json_schema import LLGUIDANCE, Schema, SchemaError

MAX_WHITESPACE = 40  # characters in a row: weak models go on for ever otherwise
# Escapes that can write one key in two ways would get round what its schema says.
JSON_OPTIONS: dict[str, Any] = {"json_allowed_escapes": 'nrbtf\\"'}
TEXT = "TEXT: /(?s:.*)/"
_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength", "pattern"}  # what is followed without quotes, too


def between_tokens(whitespace: str) -> dict[str, Any]:
    """How JSON is written with white space between its tokens that matches this regular expression."""
    return JSON_OPTIONS | {"whitespace_flexible": True, "whitespace_pattern": whitespace}


def whitespace(most: int = MAX_WHITESPACE) -> str:
    return rf"[\x20\x0A\x0D\x09]{{1,{most}}}"


def lark(format: Grammar, arguments: Mapping[str, Grammar]) -> str:
    """The text of a grammar. Its elements are some of xgrammar's structural tags (const_string, sequence, or, star,
    json_schema), and

    - list: content, and any number of it after a separator
    - until: any text up to where `value` comes first, and that
    - regex: what a pattern matches
    - keywords: before, name, sign, value, after and rest of each required property, and of any others, in their order,
      with separators. The values of `texts` are no JSON, and end where `after` first comes; `any`: all properties may
      come, and are texts
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
        self._terminals: dict[str, str] = {}

    def write(self, grammar: Grammar) -> str:
        start = self._expression(grammar)
        defined = {**self._terminals, **self._rules}
        return "\n".join([f"start: {start}", TEXT, *(f"{name}: {said}" for said, name in defined.items())])

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
            case "until":
                return self._rule(f"TEXT {json.dumps(grammar['value'])}", "[lazy]")
            case "regex":
                return f"/{grammar['pattern']}/"
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
        before, after, rest = (grammar.get(name, "") for name in ("before", "after", "rest"))
        separator, required, texts = json.dumps(grammar["separator"]), grammar["required"], grammar.get("texts", ())
        if grammar.get("any"):
            key, text = (self._expression({"type": "until", "value": end}) for end in (grammar["sign"], after))
            return f"({json.dumps(before)} {key} {text} {json.dumps(rest)})*"
        said = {}
        for name, schema in grammar["properties"].items():
            if name in texts:
                value = self._text(schema, after)
            else:
                value = f"{self._json(schema, grammar['max_whitespace_cnt'])} {json.dumps(after)}"
            said[name] = f"{json.dumps(before + name + grammar['sign'])} {value} {json.dumps(rest)}"
        others, beginnings = "", []
        for name in [name for name in reversed(said) if name not in required]:
            beginnings.append(f"{said[name]} {others}")
            others = self._rule(f"({separator} {said[name]})? {others}")
        if not required:
            return f"({' | '.join(beginnings)})?" if beginnings else '""'
        return f" {separator} ".join(said[name] for name in said if name in required) + f" {others}"

    def _text(self, schema: dict[str, Any], end: str) -> str:
        """A string as it is, without quotes, and what ends it. Raises SchemaError."""
        rules = Schema(dict(schema)).root
        if unknown := [name for name in rules if name in LLGUIDANCE - _OF_TEXTS]:
            raise SchemaError(f"the keyword {unknown[0]!r} is not supported for texts in this model's tool calls.")
        if options := rules.get("enum", [rules["const"]] if "const" in rules else []):
            return self._rule(" | ".join(json.dumps(option + end) for option in options if isinstance(option, str)))
        if not rules.keys() & _OF_TEXTS - {"type"}:
            return self._expression({"type": "until", "value": end})
        shortest, longest = rules.get("minLength", 0), rules.get("maxLength", "")
        terms = [f"/(?s:.{{{shortest},{longest}}})/", f"~/(?s:.*){_exactly(end)}(?s:.*)/"]
        if (pattern := rules.get("pattern")) is not None:
            terms.append(f"/{_searched(pattern)}/")
        name = f"T{len(self._terminals)}"
        said = f"({' & '.join(terms)}) {json.dumps(end)}"
        return self._terminals.setdefault(said, name)

    def _dispatch(self, grammar: Grammar) -> str:
        """Any text, in which each trigger begins what its rule says; `loop`: text may follow again."""
        calls = []
        for trigger, following in grammar["rules"]:
            head = self._rule(f"TEXT {json.dumps(trigger)}", "[lazy]")  # it ends where the trigger first does
            calls.append(f"{head} {self._expression(following)}")
        call = self._rule(f"({' | '.join(calls)}) {self._expression(grammar['then'])}")
        return f"{call}* TEXT" if grammar["loop"] else f"({call} | TEXT)"


def _searched(pattern: str) -> str:
    """What a text must be in which this pattern, as Rust has it, is found. Raises SchemaError."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    bare = re.sub(r"\\.|\[\^", "", inner, flags=re.DOTALL)
    if "^" in bare or "$" in bare or ((begins or ends) and "|" in bare):
        raise SchemaError("a 'pattern' with '^' or '$' within it is not supported in this model's tool calls.")
    anything = "(?s:.*)"
    return f"{'' if begins else anything}(?:{_slashed(inner)}){'' if ends else anything}"


def _exactly(text: str) -> str:
    return "".join(rf"\x{{{ord(char):x}}}" for char in text)


def _slashed(pattern: str) -> str:
    """As it stands between slashes."""
    return pattern.replace("/", r"\/").replace("\n", r"\n").replace("\r", r"\r")
