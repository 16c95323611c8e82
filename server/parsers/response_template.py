"""What a model's response_template says of its answers: regions of text, the fields of a message that they are, and how
calls of tools are written in them. The form is that of transformers (5.13 and later), in tokenizer_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .json_text import as_object
from .pattern_nodes import PatternError, instance, literals, may_be_empty
from .patterns import Found, Pattern, Search, find_all
from .python_text import as_json
from .tagged import schema_of
from .values import kinds, value_of

REASONING = ("thinking", "reasoning", "reasoning_content")
_FIELDS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
}  # fmt: skip
_TOP = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_MAX_FIELDS = 16
_MAX_TAGS = 1000  # of one call
_PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_MARK = "Kq0Kz"  # stands for what a call has in its place
Call = tuple[str, str]  # name, the JSON text of its arguments


class TemplateError(ValueError):
    """One clause: what of a template is wrong, or not supported."""


@dataclass(frozen=True)
class Region:
    """A field of a message, and where its text begins and ends."""

    name: str
    open: Pattern | None  # None: whatever is in no other region
    close: Pattern | None  # None: it ends with the answer
    join: str | None = None  # stands between two of them
    strips: bool = True  # white space around its text is dropped
    at_once: bool = False  # an answer may begin within it

    @property
    def opening(self) -> str:
        return "" if self.open is None else instance(self.open.node)

    @property
    def closing(self) -> str:
        return "" if self.close is None else instance(self.close.node)


@dataclass(frozen=True)
class CallRegion(Region):
    """Calls of tools. Their names and arguments stand in its groups or in its text, at these paths."""

    each: bool = False  # the text is a list of calls
    called: str = ""
    arguments: str = ""
    tags: Pattern | None = None  # key and value of each argument; None: the text is JSON
    typed: bool = True  # a text whose schema says nothing may be JSON
    quotes: tuple[tuple[str, str], ...] = ()  # stand around texts, in place of JSON's
    bare_keys: bool = False  # the keys of objects may stand without quotes

    @property
    def streams(self) -> bool:
        """The text is plain JSON, and all of it the arguments of the call that is named before it."""
        plain = self.tags is None and not self.quotes and not self.bare_keys and not self.each
        return plain and self.arguments == "{content}" and self.called[1:-1] in self.names

    def calls(self, text: str, groups: Mapping[str, str], tools: Mapping[str, str]) -> list[Call] | None:
        """Those in the text of a region. None: there are none, or some other tool's, or the text is not whole."""
        if self.tags is not None and _in(self.called, groups) in tools:
            schema = schema_of(tools[groups[self.called[1:-1]]])
            found = None if (tags := self.tagged(text)) is None else self._values(text, tags, schema)
        else:
            found = self._json(text)
        if found is None:
            return None
        scopes = [{**groups, "content": found}]
        if self.each:
            if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
                return None
            scopes = [{**groups, **one} for one in found]
        calls = []
        for scope in scopes:
            name, arguments = _in(self.called, scope), _in(self.arguments, scope)
            written = arguments if isinstance(arguments, str) else as_json(arguments)
            if not isinstance(name, str) or name not in tools or (written := as_object(written)) is None:
                return None
            calls.append((name, written))
        return calls or None

    def tagged(self, text: str) -> list[Found] | None:
        """The arguments. None: one of them is not whole."""
        assert self.tags is not None
        if (found := find_all(self.tags, text)) is None:
            return None
        begin = literals(self.tags.node)[0]
        begun, ended = [one.start for one in found], [one.end for one in found]
        rest = "".join(text[a:b] for a, b in zip([0, *ended], [*begun, len(text)], strict=True))
        return None if begin in rest or len(found) > _MAX_TAGS else found

    def _values(self, text: str, tags: list[Found], schema: dict[str, Any]) -> dict[str, Any]:
        properties = schema["properties"]
        found = {}
        for tag in tags:
            key, value = (text[slice(*tag.groups.get(name, (0, 0)))] for name in ("key", "value"))
            if self.quotes and isinstance(quoted := self._json(value), str):
                found[key] = quoted
            elif self.typed or kinds(properties.get(key), schema):
                found[key] = value_of(value, properties.get(key), schema)
            else:
                found[key] = value
        return found

    def _json(self, text: str) -> Any:
        try:
            return msgspec.json.decode(self._plain(text.strip()))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None

    def _plain(self, text: str) -> str:
        """As JSON has it."""
        if not self.quotes and not self.bare_keys:
            return text
        opens = "|".join(re.escape(begin) for begin, _ in self.quotes)
        found = re.compile(rf"(?P<open>{opens or '(?!)'})|{_PIECES}")
        ends = dict(self.quotes)
        pieces, at = [], 0
        while (one := found.search(text, at)) is not None:
            pieces.append(text[at : one.start()])
            at = one.end()
            if one["open"]:
                end = text.find(ends[one["open"]], at)
                if end < 0:
                    break
                pieces.append(json.dumps(text[at:end], ensure_ascii=False))
                at = end + len(ends[one["open"]])
            elif one["quote"]:
                if (rest := _QUOTED.match(text, at)) is None:
                    break
                pieces.append('"' + rest[0])
                at = rest.end()
            elif one["word"]:
                pieces.append(_WORDS[one["word"]])
            else:
                pieces.append(one["before"] + (json.dumps(one["key"]) if self.bare_keys else one["key"]))
        return "".join((*pieces, text[at:]))

    def sample(self, name: str, is_loose: bool) -> tuple[str, str]:
        """What stands before and behind the arguments of a call, in some spelling of it. `is_loose`: as `instance` has
        it."""
        begun = instance(self.open.node, {self.called[1:-1]: name}, is_loose) if self.open is not None else ""
        closing = "" if self.close is None else instance(self.close.node, None, is_loose)
        if self.arguments == "{content}":
            return begun, closing
        scope: dict[str, Any] = {}
        for path, value in ((self.called, name), (self.arguments, _MARK)):
            keys = path[1:-1].split(".")[0 if self.each else 1 :]
            inner = scope
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    raise TemplateError(f"its 'transform' has {path[:60]!r} within another")
            if _PLACE.fullmatch(path) and path[1:-1] not in self.names and keys:
                inner[keys[-1]] = value
        before, _, behind = json.dumps([scope] if self.each else scope).partition(f'"{_MARK}"')
        return begun + before, behind + closing

    @property
    def names(self) -> list[str]:
        return [] if self.open is None else self.open.names


_PIECES = r'(?P<quote>")|(?P<before>[{,]\s*)(?P<key>\w+)(?=\s*:)|\b(?P<word>True|False|None)\b'
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python writes them
_QUOTED = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


@dataclass(frozen=True)
class ResponseTemplate:
    source: str
    regions: tuple[Region, ...]  # those that are opened by something
    rest: Region | None  # what is in none of them; None: that is dropped
    calls: CallRegion | None
    reasoning: Region | None
    unread: str = ""  # why the reasoning is not read, where it is not
    literals: frozenset[str] = field(default_factory=frozenset)  # of all patterns

    def is_content(self, region: Region) -> bool:
        return region.name == "content"


def read_template(spec: Any) -> ResponseTemplate:
    """Raises TemplateError."""
    if not isinstance(spec, dict):
        raise TemplateError("it is no object")
    if spec.get("version", 1) != 1:
        raise TemplateError(f"its version is {str(spec['version'])[:20]!r}, and 1 is known")
    if unknown := sorted(spec.keys() - _TOP):
        raise TemplateError(f"the key {unknown[0][:60]!r} is not known")
    fields = spec.get("fields")
    if not isinstance(fields, dict) or not 0 < len(fields) <= _MAX_FIELDS:
        raise TemplateError(f"'fields' must be an object with 1 to {_MAX_FIELDS} fields")
    regions: list[Region] = []
    unread = ""
    for name, given in fields.items():
        try:
            regions.append(_region(name, given))
        except (PatternError, TemplateError) as error:
            if name not in REASONING:
                raise TemplateError(f"field {name[:60]!r}: {error}") from None
            unread = f"field {name!r}: {error}"
    without = [region for region in regions if region.open is None]
    if len(without) > 1 or any(region.name != "content" for region in without):
        raise TemplateError("a field other than 'content' has neither 'open' nor 'open_pattern'")
    opened = tuple(region for region in regions if region.open is not None)
    has_content = any(region.name == "content" for region in regions)
    rest = without[0] if without else None if has_content else Region("content", None, None)
    return ResponseTemplate(
        source=json.dumps(spec, sort_keys=True),
        regions=opened,
        rest=rest,
        calls=next((region for region in opened if isinstance(region, CallRegion)), None),
        reasoning=next((region for region in opened if region.name in REASONING), None),
        unread=unread,
        literals=frozenset(text for region in regions for text in _texts(region)),
    )


def _region(name: str, given: Any) -> Region:
    """Raises PatternError, TemplateError."""
    if not isinstance(given, dict):
        raise TemplateError("it is no object")
    if unknown := sorted(given.keys() - _FIELDS):
        raise TemplateError(f"the key {unknown[0][:60]!r} is not known")
    opens, closes = (_pattern(given, side) for side in ("open", "close"))
    content, more = given.get("content", "text"), given.get("content_args", {})
    join = given.get("join")
    if not isinstance(more, dict) or not isinstance(join, str | None):
        raise TemplateError("'content_args' must be an object, and 'join' a string")
    at_once = opens is not None and may_be_empty(opens.node, at_start=True)
    for pattern in filter(None, (opens, closes)):
        if may_be_empty(pattern.node, at_start=False):
            raise TemplateError("what opens or closes it may be nothing at all")
    if name != "tool_calls":
        if name in ("content", *REASONING) and content != "text":
            raise TemplateError(f"its content is {str(content)[:60]!r}, and must be text")
        return Region(name, opens, closes, join, more.get("strip", True) is not False, at_once)
    if opens is None or at_once:
        raise TemplateError("nothing opens a call")
    return _call_region(given, opens, closes, content, more)


def _call_region(given: dict[str, Any], opens: Pattern, closes: Pattern | None, content: Any, more: Any) -> CallRegion:
    each, transform = bool(given.get("transform_each", False)), given.get("transform")
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if function is None or function == "{content}":
        inner = "function." if transform is None else ""
        function = {"name": f"{{content.{inner}name}}", "arguments": f"{{content.{inner}arguments}}"}
    paths = [function.get(name) if isinstance(function, dict) else None for name in ("name", "arguments")]
    for path in paths:
        if not isinstance(path, str) or not (found := _PLACE.fullmatch(path)):
            raise TemplateError("its 'transform' does not say where name and arguments of a call are")
        if not each and found[1].split(".")[0] not in ("content", *opens.names):
            raise TemplateError(f"its 'transform' has {path[:60]!r}, which nothing gives")
    read = CallRegion("tool_calls", opens, closes, each=each, called=str(paths[0]), arguments=str(paths[1]))
    if content == "json":
        return _with_quotes(read, more)
    if content != "xml-inline":
        raise TemplateError(f"its content is {str(content)[:60]!r}: of calls, json and xml-inline are supported")
    if each or read.arguments != "{content}" or read.called[1:-1] not in opens.names:
        raise TemplateError("calls in tags need a name before their arguments, and nothing else")
    tags = Pattern(str(more.get("tag_pattern")))
    if not {"key", "value"} <= set(tags.names) or not literals(tags.node) or may_be_empty(tags.node, at_start=True):
        raise TemplateError("its 'tag_pattern' must have the groups key and value, and some text")
    parser = more.get("value_parser") or {"name": "text"}
    if not isinstance(parser, dict) or parser.get("name") not in ("text", "json", "int", "float", "bool"):
        raise TemplateError("its 'value_parser' is not known")
    fields = {**read.__dict__, "tags": tags, "typed": parser["name"] != "text"}
    return _with_quotes(CallRegion(**fields), parser.get("args") or {})


def _with_quotes(region: CallRegion, more: Any) -> CallRegion:
    quotes = more.get("string_delims", []) if isinstance(more, dict) else None
    if not isinstance(quotes, list) or not all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(side, str) and side for side in one)
        for one in quotes
    ):
        raise TemplateError("its 'string_delims' must be pairs of texts")
    keys = bool(more.get("unquoted_keys", False))
    return CallRegion(**{**region.__dict__, "quotes": tuple(map(tuple, quotes)), "bare_keys": keys})


def _pattern(given: dict[str, Any], side: str) -> Pattern | None:
    """Raises PatternError, TemplateError."""
    literal, pattern = given.get(side), given.get(f"{side}_pattern")
    if literal is not None and pattern is not None:
        raise TemplateError(f"it has '{side}' and '{side}_pattern'")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise TemplateError(f"'{side}_pattern' must be a string")
        return Pattern(pattern)
    if literal is None:
        return None
    texts = [literal] if isinstance(literal, str) else literal
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise TemplateError(f"'{side}' must be a text or a list of texts, none of them empty")
    return Pattern(tuple(texts))


def _texts(region: Region) -> list[str]:
    patterns, quotes = [region.open, region.close], []
    if isinstance(region, CallRegion):
        patterns.append(region.tags)
        quotes = [quote for pair in region.quotes for quote in pair]
    return [text for one in patterns if one is not None for text in literals(one.node)] + quotes


def _in(path: str, scope: Mapping[str, Any]) -> Any:
    """What a place of a transform stands for; None where there is nothing."""
    value: Any = scope
    for key in path[1:-1].split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def found_in(pattern: Pattern, text: str, at: int = 0) -> tuple[int, int, dict[str, str]] | None:
    """Where it is first found: start, end, groups."""
    search = Search(pattern)
    search.feed(text[at:])
    search.end()
    if (one := search.found) is None:
        return None
    groups = {name: text[at + a : at + b] for name, (a, b) in one.groups.items()}
    return at + one.start, at + one.end, groups
