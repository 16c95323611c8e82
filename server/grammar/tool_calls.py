"""What an answer that may call tools must look like, as a grammar whose size grows with that of the tools."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import msgspec

from ..parsers.formats import Grammar, ToolFormat, const, sequence, star
from .constraint import Constraint
from .json_schema import Schema, SchemaError, UnknownType, without_annotations
from .lark import lark

ANY_OBJECT = '{"type":"object"}'
MAX_EXACT = 2 << 20  # characters of all schemas, above which arguments are any objects: reading them takes too long
MAX_KEPT = 16 << 20  # bytes of all results that are kept
MAX_ENTRY = 1 << 20  # bytes of one that is kept

Constraints = tuple[Constraint, ...]  # the first that can be compiled


@dataclass(frozen=True)
class Tool:
    name: str
    schema: str  # of its arguments, as JSON
    strict: bool


class _Kept:
    """The latest results, for agents, which send the same tools with each request. Bounded by size."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, Constraints] = OrderedDict()
        self._lock = Lock()  # large ones are made on threads

    def get(self, key: bytes) -> Constraints | None:
        with self._lock:
            if (found := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: bytes, made: Constraints) -> None:
        if (size := _size(made)) > MAX_ENTRY:
            return
        with self._lock:
            if key not in self._entries:
                self._entries[key] = made
                self.num_bytes += size
            while self.num_bytes > MAX_KEPT:
                self.num_bytes -= _size(self._entries.popitem(last=False)[1])


def _size(made: Constraints) -> int:
    return sum(len(constraint.text) for constraint in made)


kept = _Kept()


def constraints(
    format: ToolFormat, tools: Sequence[Tool], mode: str, parallel: bool, content: str | None
) -> Constraints:
    """`tools`: those that may be called; `mode`: as ToolUse has it; `content`: the JSON schema of text that may come
    instead of a call.
    """
    written = [format.name, format.source, format.begin(""), format.end]
    described = [*written, [(tool.name, tool.schema, tool.strict) for tool in tools], mode, parallel, content]
    key = hashlib.sha256(msgspec.msgpack.encode(described)).digest()
    if (made := kept.get(key)) is None:
        made = _make(format, tools, mode, parallel, content)
        kept.put(key, made)
    return made


def _make(format: ToolFormat, tools: Sequence[Tool], mode: str, parallel: bool, content: str | None) -> Constraints:
    readable = sum(len(tool.schema) for tool in tools) <= MAX_EXACT
    exact: dict[str, str | None] = {}
    loose: dict[str, str] = {}
    for tool in tools:
        must_be_right = tool.strict
        try:
            exact[tool.name] = _exact(format, tool) if readable else None
        except UnknownType:  # the template may know what it means; whoever demands a call is told
            exact[tool.name] = None
            must_be_right |= mode != "auto"
        loose[tool.name] = tool.schema if must_be_right else ANY_OBJECT
    best = {name: schema or loose[name] for name, schema in exact.items()}
    attempts = [best] if best == loose else [best, loose]
    return tuple(_constraint(format, schemas, mode, parallel, content) for schemas in attempts)


def _exact(format: ToolFormat, tool: Tool) -> str | None:
    """The tool's schema where a grammar can follow it. Only strict tools are refused where none can. Raises
    UnknownType.
    """
    try:
        schema = without_annotations(msgspec.json.decode(tool.schema))
        text = msgspec.json.encode(schema).decode()
        if (arguments := format.arguments(msgspec.json.decode(text)))["type"] != "json_schema":
            lark(arguments, {})
        Schema(schema)
        return text
    except UnknownType:
        raise
    except (SchemaError, RecursionError):
        return None


def _constraint(
    format: ToolFormat, schemas: dict[str, str], mode: str, parallel: bool, content: str | None
) -> Constraint:
    calls = {name: format.arguments(msgspec.json.decode(schema)) for name, schema in schemas.items()}
    text = partial(const, is_loose=format.loose)

    def call(name: str, begun: Grammar) -> Grammar:
        return sequence(begun, format.after_name, {"type": "arguments", "of": name}, text(format.end))

    whole = _any([call(name, sequence(format.before_name, text(format.begin(name)))) for name in calls])
    if mode != "auto" or content is not None:
        several: Grammar = (
            {"type": "list", "content": whole, "separator": text(format.separator)} if parallel else whole
        )
        grammar: Grammar = {"type": "sequence", "elements": [text(format.opening), several, text(format.closing)]}
        if content is not None:
            said = {"type": "json_schema", "json_schema": msgspec.json.decode(content)}
            grammar = _any([grammar, sequence(const(format.content_begin), said)])
        grammar = sequence(format.lead or const(""), grammar)
    else:
        then = text(format.closing)  # after the first call
        if parallel and format.opening:
            then = sequence(star(sequence(text(format.separator), whole)), then)
        rules: dict[str, list[Grammar]] = {}  # after what triggers it
        for name in calls:
            begin = format.begin(name)
            trigger = format.trigger or format.opening + begin
            if format.opening.startswith(trigger):
                opened = sequence(text(format.opening.removeprefix(trigger)), format.before_name, text(begin))
            else:
                opened = text((format.opening + begin).removeprefix(trigger))
            rules.setdefault(trigger, []).append(call(name, opened))
        found = [[trigger, _any(alternatives)] for trigger, alternatives in rules.items()]
        grammar = {"type": "dispatch", "rules": found, "then": then, "loop": parallel and not format.opening}
    described = msgspec.json.encode({"format": grammar, "arguments": calls}).decode()
    return Constraint("tools", described, markers=bool(format.markers))


def _any(elements: list[Grammar]) -> Grammar:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
