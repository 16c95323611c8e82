"""Grammars of tool calls in llguidance's language. xgrammar's form of them grows with the square of their schemas: five
tools of five parameters take 6 MB with 150,000 tokens, and 200 take the engine seconds to read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..parsers.formats import Grammar
from ..parsers.json_text import kind_of
from ..parsers.values import Looks, branches, kinds, kinds_of
from .json_schema import LLGUIDANCE, Schema, SchemaError

MAX_WHITESPACE = 40  # characters in a row: weak models go on for ever otherwise
# Escapes that can write one key in two ways would get round what its schema says.
JSON_OPTIONS: dict[str, Any] = {"json_allowed_escapes": 'nrbtf\\"'}
TEXT = "TEXT: /(?s:.*)/"
MAX_ANY_ORDER = 6  # properties of one tool: each more doubles the rules
MAX_ORDERS = 2048  # of such rules in all
MAX_LOOKS = 1 << 20  # into the schemas of one grammar, which take less than a second: the rest is unknown
# How models that write texts without quotes may write these.
_AS_PYTHON = {
    '{"type": "boolean"}': '("true" | "false" | "True" | "False")',
    '{"type": "null"}': '("null" | "None")',
}
# Values of JSON whose keys stand without quotes.
_SCALARS = r'/-?[0-9]{1,20}(\.[0-9]{1,20})?/ | "true" | "false" | "null"'
_KEYED = r'/[^{}\[\],:<"\s]{1,100}/ ":" unquoted'
_UNQUOTED = {
    "array": '"[" (unquoted ("," unquoted)*)? "]"',
    "object": f'"{{" ({_KEYED} ("," {_KEYED})*)? "}}"',
}
_OTHER_TYPES = {"number", "boolean", "null", "array", "object"}  # than texts
_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength", "pattern"}  # what is followed without quotes, too


def between_tokens(whitespace: str) -> dict[str, Any]:
    """How JSON is written with white space between its tokens that matches this regular expression."""
    return JSON_OPTIONS | {"whitespace_flexible": True, "whitespace_pattern": whitespace}


def whitespace(most: int = MAX_WHITESPACE) -> str:
    return rf"[\x20\x0A\x0D\x09]{{1,{most}}}"


def lark(format: Grammar, arguments: Mapping[str, Grammar]) -> str:
    """The text of a grammar. Its elements are some of xgrammar's structural tags (const_string, sequence, or, star,
    json_schema), and

    - const_string: `loose`: its line ends may be missing
    - list: content, and any number of it after a separator
    - until: any text up to where `value` comes first, and that
    - regex: what a pattern matches
    - keywords: before, name, sign, value, after and rest of each required property, and of any others, with separators,
      in any order where that takes few rules, else in theirs. `exact`: no line end in them may be missing. `is_bare`:
      texts are no JSON, and end where `after` first comes; `around`: what stands on either side of a value; `signs`: of
      texts, of others ({}: their types); `any`: all properties may come, and are texts
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
        self._looks = Looks(MAX_LOOKS)
        self._num_orders = 0  # sets of properties that rules were made for
        self._is_exact = False  # no line end of the arguments may be missing

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
                return self._const(grammar["value"], grammar.get("loose", False))
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
                return f"{one} ({self._expression(grammar['separator'])} {one})*"
            case "json_schema":
                return self._json(grammar["json_schema"], grammar.get("max_whitespace_cnt", MAX_WHITESPACE))
            case "keywords":
                return self._keywords(grammar)
            case "arguments":
                return self._arguments_of(grammar["of"])
            case "dispatch":
                return self._dispatch(grammar)
        raise AssertionError(grammar["type"])

    def _const(self, text: str, loose: bool | None = None) -> str:
        """`loose`: its line ends may be missing; None: as the arguments say."""
        if not (not self._is_exact if loose is None else loose) or "\n" not in text:
            return json.dumps(text)
        return ' "\\n"? '.join(json.dumps(line) if line else "" for line in text.split("\n")).strip()

    def _arguments_of(self, tool: str) -> str:
        if tool not in self._written:  # reading a schema changes it
            self._written[tool] = self._rule(self._expression(self._arguments[tool]))
        return self._written[tool]

    def _json(self, schema: Any, most: int) -> str:
        """`most`: characters of white space in a row."""
        options = {"x-guidance": between_tokens(whitespace(most))}
        return self._rule(f"%json {json.dumps(Schema(schema).root | options)}")

    def _keywords(self, grammar: Grammar) -> str:
        self._is_exact = grammar.get("exact", False)
        after, rest = grammar.get("after", ""), self._const(grammar.get("rest", ""))
        if grammar.get("any") and "structures" in grammar:
            self._unquoted(after)
            return f'({_KEYED} ("," {_KEYED})*)?'
        if grammar.get("any"):
            key, text = (self._expression({"type": "until", "value": end}) for end in (grammar["signs"][0], after))
            return f"({self._const(grammar['before'])} {key} {text} {rest})*"
        said = {
            name: self._rule(f"{self._member(name, schema, grammar)} {rest}".strip())
            for name, schema in grammar["properties"].items()
        }
        required = frozenset(grammar["required"])
        names = list(said)
        if len(names) <= MAX_ANY_ORDER and self._num_orders + 2 ** len(names) <= MAX_ORDERS:
            self._num_orders += 2 ** len(names)
            return self._in_any_order(said, required, json.dumps(grammar["separator"]))
        return self._in_order(said, required, json.dumps(grammar["separator"]))

    def _in_order(self, said: dict[str, str], required: frozenset[str], separator: str) -> str:
        """Required ones, and then any others."""
        others, beginnings = "", []
        for name in [name for name in reversed(said) if name not in required]:
            beginnings.append(f"{said[name]} {others}")
            others = self._rule(f"({separator} {said[name]})? {others}")
        if not required:
            return f"({' | '.join(beginnings)})?" if beginnings else '""'
        return f" {separator} ".join(said[name] for name in said if name in required) + f" {others}"

    def _in_any_order(self, said: dict[str, str], required: frozenset[str], separator: str) -> str:
        """Each at most once: a rule for each set of those that may still come."""
        written: dict[frozenset[str], str] = {frozenset(): ""}

        def rest(left: frozenset[str]) -> str:
            if left not in written:
                nexts = [f"{separator} {said[name]} {rest(left - {name})}" for name in said if name in left]
                written[left] = self._rule(f"({' | '.join(nexts)}){'' if left & required else '?'}")
            return written[left]

        everything = frozenset(said)
        firsts = [f"{one} {rest(everything - {name})}" for name, one in said.items()]
        if not firsts:
            return '""'
        return f"({' | '.join(firsts)}){'' if required else '?'}"

    def _member(self, name: str, schema: Any, grammar: Grammar) -> str:
        """Name, sign, value and what ends it. Raises SchemaError."""
        around, after, most = grammar.get("around", ""), grammar.get("after", ""), grammar["max_whitespace_cnt"]
        after = after.replace("{}", name)
        begun, (of_text, of_other) = f"{grammar['before']}{name}", grammar["signs"]
        end = self._const(around + grammar.get("after_others", after))
        texts, others = apart(schema, self._looks) if grammar.get("is_bare") else ([], schema)
        found = [f"{self._const(begun + of_text)} {self._text(one, around, after, others)}" for one in texts]
        if others is not None:
            value = _AS_PYTHON.get(json.dumps(others)) if grammar.get("is_bare") else None
            value = value and f"{value} {end}"
            value = value or self._structure(others, grammar, after) or f"{self._json(others, most)} {end}"
            found.append(f"{self._typed(begun, of_other, others)} {self._const(around)} {value}")
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _typed(self, begun: str, sign: str, schema: Any) -> str:
        """What stands before a value, with its type where the sign tells that."""
        if "{}" not in sign:
            return self._const(begun + sign)
        types = (kinds(schema, schema, self._looks) or _OTHER_TYPES) - {"string"}
        named = sorted(
            "number" if one == "integer" else one for one in types - ({"integer"} if "number" in types else set())
        )
        return f"({' | '.join(self._const(begun + sign.replace('{}', one)) for one in named)})"

    def _text(self, schema: dict[str, Any], around: str, after: str, others: Any) -> str:
        """A string as it is, without quotes, and what ends it. Raises SchemaError."""
        rules = Schema(dict(schema)).root
        if unknown := [name for name in rules if name in LLGUIDANCE - _OF_TEXTS]:
            raise SchemaError(f"the keyword {unknown[0]!r} is not supported for texts in this model's tool calls.")
        if options := rules.get("enum", [rules["const"]] if "const" in rules else []):
            found = [self._option(option, around, after) for option in options if isinstance(option, str)]
            return self._rule(" | ".join(found))
        if not rules.keys() & _OF_TEXTS - {"type"}:
            text = self._expression({"type": "until", "value": after})
            # What looks like a list or an object is read as one.
            if _has_structures(others, self._looks):
                return f"{self._const(around)} ({json.dumps(after)} | /[^\\[{{\\s]/ {text})"
            return text
        shortest, longest = rules.get("minLength", 0), rules.get("maxLength", "")
        terms = [f"/(?s:.{{{shortest},{longest}}})/", f"~/(?s:.*){_exactly(around + after)}(?s:.*)/"]
        if (pattern := rules.get("pattern")) is not None:
            terms.append(f"/{_searched(pattern)}/")
        name = f"T{len(self._terminals)}"
        said = f"({' & '.join(terms)}) {json.dumps(around + after)}"
        return f"{json.dumps(around)} {self._terminals.setdefault(said, name)}"

    def _structure(self, schema: Any, grammar: Grammar, after: str) -> str | None:
        """Lists and objects of formats that do not write them as JSON, whatever is in them, and what ends them."""
        kind = grammar.get("structures")
        if kind is None or not (_has_structures(schema, self._looks) or not kinds(schema, schema, self._looks)):
            return None
        if kind == "until":
            return self._expression({"type": "until", "value": after})
        self._unquoted(after)
        allowed = sorted(_UNQUOTED.keys() & kinds(schema, schema, self._looks))
        return f"({' | '.join(_UNQUOTED[name] for name in allowed)})" if allowed else "unquoted"

    def _unquoted(self, quote: str) -> None:
        """The rule of any value, of which texts stand between `quote`."""
        text = f"{json.dumps(quote)} {self._expression({'type': 'until', 'value': quote})}"
        self._rules.setdefault(f"{text} | {_SCALARS} | {_UNQUOTED['array']} | {_UNQUOTED['object']}", "unquoted")

    def _option(self, text: str, around: str, after: str) -> str:
        """A text that is listed. Where it has line ends of its own, those around it must be there."""
        exact = text != text.strip("\n")
        loose = None if not exact else False
        return " ".join((self._const(around, loose), json.dumps(text), self._const(around + after, loose)))

    def _dispatch(self, grammar: Grammar) -> str:
        """Any text, in which each trigger begins what its rule says; `loop`: text may follow again."""
        calls = []
        for trigger, following in grammar["rules"]:
            head = self._rule(f"TEXT {json.dumps(trigger)}", "[lazy]")  # it ends where the trigger first does
            calls.append(f"{head} {self._expression(following)}")
        call = self._rule(f"({' | '.join(calls)}) {self._expression(grammar['then'])}")
        return f"{call}* TEXT" if grammar["loop"] else f"({call} | TEXT)"


def apart(schema: Any, looks: Looks) -> tuple[list[dict[str, Any]], Any]:
    """(the schemas of texts that a value may be, the schema of what else it may be): None: nothing else. Beside texts
    that are not listed there are no numbers, which would be read as such texts."""
    found = branches(schema, schema, looks)
    if not found or not all(map(kinds_of, found)):
        return [], schema
    texts, others = [], []
    for branch in found:
        types = kinds_of(branch)
        if "string" in types:
            texts.append(_of_types(branch, {"string"}))
        if types := types - {"string"} - ({"integer"} if "number" in types else set()):
            others.append(_of_types(branch, types))
    if not texts:
        return [], schema
    if not all("enum" in one or "const" in one for one in texts):
        others = [one for one in others if kinds_of(one) <= {"null", "array", "object"}]
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    texts = [{name: value for name, value in one.items() if name not in definitions} for one in texts]
    if not others:
        return texts, None
    return texts, others[0] if len(others) == 1 else {"anyOf": others, **definitions}


def _of_types(branch: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """The part of a schema that is about these types."""
    names = sorted(types)
    made = {**branch, "type": names[0] if len(names) == 1 else names}
    if isinstance(listed := branch.get("enum"), list):
        made["enum"] = [value for value in listed if types & kind_of(value)]
    made.pop("nullable", None)
    return made


def _has_structures(schema: Any, looks: Looks) -> bool:
    return schema is not None and bool(kinds(schema, schema, looks) & {"array", "object"})


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
