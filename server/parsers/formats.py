"""What is known of each format, and which one a model uses. Every file in this folder with FORMATS adds some."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .reader import Reader, new_id
from .text_reader import Reading

Grammar = dict[str, Any]  # what lark.py reads
MAX_WHITESPACE = 8  # characters in a row within the arguments of a call


def const(text: str, is_loose: bool = False) -> Grammar:
    """`is_loose`: its line ends may be missing."""
    return {"type": "const_string", "value": text, **({"loose": True} if is_loose else {})}


def sequence(*elements: Grammar) -> Grammar:
    real = [element for element in elements if element.get("value") != ""]
    return real[0] if len(real) == 1 else {"type": "sequence", "elements": real}


def star(content: Grammar) -> Grammar:
    return {"type": "star", "content": content}


def until(text: str) -> Grammar:
    """Anything up to where this comes first, and it."""
    return {"type": "until", "value": text}


def json_arguments(schema: dict[str, Any]) -> Grammar:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def members(schema: dict[str, Any]) -> Grammar:
    """What each argument must be, by itself, and which of them must be there."""
    properties = schema.get("properties") or {}
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if definitions:
        properties = {k: {**one, **definitions} if isinstance(one, dict) else one for k, one in properties.items()}
    return {"properties": properties, "required": [name for name in schema.get("required", ()) if name in properties]}


@dataclass(frozen=True)
class Detection:
    """How a chat template gives a format away: it has one of `any`, and none of `none`."""

    any: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()  # of config.json, where the template says that there are tools but not how

    def matches(self, template: str) -> bool:
        return any(sign in template for sign in self.any) and not any(sign in template for sign in self.none)


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls: opening, calls with separators between them, closing. A call is
    before_name, begin(its name), after_name, arguments, end."""

    name: str
    read: Callable[[Reader], Reading[None]]
    begin: Callable[[str], str]
    end: str
    aliases: tuple[str, ...] = ()  # what others call it
    detection: Detection = Detection()
    opening: str = ""
    closing: str = ""
    separator: str = ""
    trigger: str | None = None  # from here on a text must be a call; None: from opening and begin(name) on
    before_name: Grammar = field(default_factory=lambda: const(""))
    after_name: Grammar = field(default_factory=lambda: const(""))
    arguments: Callable[[dict[str, Any]], Grammar] = json_arguments  # of a JSON schema
    begins_answers: bool = False  # a call stands at the beginning of an answer, and nowhere else
    loose: bool = False  # line ends of all these may be missing: other models of the family write none
    # What comes before calls and before other content, where both stand among reasoning: the grammar follows it all.
    lead: Grammar | None = None
    content_begin: str = ""
    markers: tuple[str, ...] = ()  # special tokens that it is written with
    new_id: Callable[[], str] = new_id
    history_id: Callable[[str], str] | None = None  # what the template wants of ids that came from elsewhere
    source: str = ""  # what it is made of, where a model brings it along


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model marks what it thinks before it answers."""

    name: str
    begin: str
    end: str
    also: tuple[tuple[str, str], ...] = ()  # other spellings of both
    between: str = ""  # stands after its end, before whatever follows
    answer: tuple[str, str] | None = None  # what may stand around the answer that follows
    # Reads whole answers, with thoughts anywhere in them; whether the prompt ends within them, None: it does not say.
    channels: Callable[[Reader, bool | None], Reading[None]] | None = None
    at_once: bool = False  # where the prompt says nothing, answers begin within it
    aliases: tuple[str, ...] = ()
    detection: Detection = Detection()
    special: tuple[str, ...] = ()  # further special tokens that it is written with

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *(self.answer or ()), *self.special)

    def read(self, reader: Reader, open: bool | None, calls: ToolFormat | None = None) -> Reading[None]:
        """The reasoning at the beginning of an answer, if there is any, up to the calls or the text after it. `open`:
        the prompt ends within it (True), after it (False), or has none of it; `calls`: how tools are called.
        """
        if self.channels is not None:
            yield from self.channels(reader, open)
            return
        trigger = None if calls is None else calls.trigger
        yield from self._thoughts(reader, open, calls, trigger)
        if self.answer is not None and not reader.thinking and (yield from reader.skip(self.answer[0])):
            reader.turn(thinking=False)
            if calls is not None and calls.begins_answers and (yield from reader.peek()) == calls.opening:
                reader.mark()
                yield from calls.read(reader)  # what a grammar had the model write, where it speaks otherwise
            found = yield from reader.text_until(self.answer[1], *filter(None, [trigger]))
            if found == trigger:
                reader.unread(found)
            else:
                reader.turn(thinking=False)

    def _thoughts(
        self, reader: Reader, open: bool | None, calls: ToolFormat | None, trigger: str | None
    ) -> Reading[None]:
        """A call in reasoning that never ends has ended it: some models forget to say so."""
        if not open and not (yield from reader.skip(self.begin, *(begin for begin, _ in self.also))):
            return
        ends = (self.end, *(end for _, end in self.also))
        reader.turn(thinking=True)
        found = yield from reader.text_until(*ends, *filter(None, [trigger]))
        if calls is not None and found == trigger:
            reader.unread(found)
            if not (yield from reader.comes(*ends)) and reader.would_call(calls.read):
                reader.turn(thinking=False)
                return
            found = yield from reader.text_until(*ends)
        if found:
            reader.turn(thinking=False)
            if self.between:
                yield from reader.skip(self.between)


@dataclass(frozen=True)
class Formats:
    """Of one model."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that are part of a call."""
        return frozenset(self.tools.markers if self.tools else ())


@cache
def known() -> tuple[tuple[ToolFormat, ...], tuple[ReasoningFormat, ...]]:
    """All formats, in the order of their files' names."""
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    modules = [importlib.import_module(f"{package}.{name}") for _, name, _ in sorted(pkgutil.iter_modules(folder))]
    formats = [format for module in modules for format in getattr(module, "FORMATS", ())]
    return (
        tuple(format for format in formats if isinstance(format, ToolFormat)),
        tuple(format for format in formats if isinstance(format, ReasoningFormat)),
    )


def choose(template: str, tool_template: str, model_type: str | None, tools: str, reasoning: str) -> Formats:
    """`template`, `tool_template`: the sources for chats without and with tools; `tools`, `reasoning`: a format's name,
    auto, or none. Raises ValueError that names the option and what it may be.
    """
    tool_formats, reasoning_formats = known()
    tool_format = _named("--tool-call-parser", tools, tool_formats)
    if tools == "auto":
        tool_format = next((format for format in tool_formats if format.detection.matches(tool_template)), None)
        if tool_format is None and "tools" in tool_template and not _unknown(tool_template):
            tool_format = next((f for f in tool_formats if model_type in f.detection.model_types), None)
    reasoning_format = _named("--reasoning-parser", reasoning, reasoning_formats)
    if reasoning == "auto":
        reasoning_format = next((f for f in reasoning_formats if f.detection.matches(template)), None)
    return Formats(tool_format, reasoning_format)


def _unknown(template: str) -> bool:
    """The template shows a format that is not known here."""
    return any(sign in template for sign in ("<invoke",))


def _named(option: str, name: str, formats: tuple[Any, ...]) -> Any:
    if name in ("auto", "none"):
        return None
    for format in formats:
        if name == format.name or name in format.aliases:
            return format
    names = ", ".join(("auto", "none", *sorted(format.name for format in formats)))
    raise ValueError(f"{option} is {name[:60]!r}: choose one of {names}")
