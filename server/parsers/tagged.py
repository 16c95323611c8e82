"""Calls whose arguments stand between tags, each by itself, texts as they are. A table of the tags is all in which the
formats differ: their readers and grammars are made of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec

from .formats import MAX_WHITESPACE, Detection, Grammar, ToolFormat, members
from .python_text import as_json
from .reader import Reader
from .text_reader import Reading
from .values import value_of

_LONGEST = 200  # characters of a key


@dataclass(frozen=True, kw_only=True)
class Tags:
    """section[0] function[0] NAME function[1] (key[0] KEY key[1] value[0] VALUE value[1])* end section[1]

    Between them are line ends, or none, whatever the model's template has: both are read, and a grammar allows both.
    """

    section: tuple[str, str]  # around calls
    function: tuple[str, str] = ("", "")  # around a name
    end: str = ""  # of a call; "": its section's
    key: tuple[str, str]
    value: tuple[str, str]
    shared: bool = False  # a section may have several calls; else it is what begins and ends each of them
    lines: bool = False  # a value stands on lines of its own
    flags: tuple[str, str] = ("", "")  # of keys, before the last character: for texts, and for other values
    quotes: tuple[str, str] = ("", "")  # may stand around a value, in which its end may stand then
    alone: bool = False  # some models forget the section: function[0] and the name of an offered tool begin a call

    @property
    def markers(self) -> tuple[str, ...]:
        tags = (*self.section, *self.function, self.end, *self.key, *self.value)
        return tuple(dict.fromkeys(tag for tag in tags if tag[:1] == "<" and tag[-1:] == ">"))


def tagged(name: str, tags: Tags, detection: Detection, aliases: tuple[str, ...] = ()) -> ToolFormat:
    around = [f"{tag}\n" if tag and tags.function[0] else tag for tag in (tags.section[0], tags.end)]
    begun, ended = (around[0], around[1] + tags.section[1]) if not tags.shared else ("", tags.end)
    return ToolFormat(
        name=name,
        aliases=aliases,
        detection=detection,
        read=partial(_read, tags=tags, stop=_stop(tags)),
        opening=around[0] if tags.shared else "",
        begin=lambda called: f"{begun}{tags.function[0]}{called}{tags.function[1]}\n",
        end=ended,
        closing=f"\n{tags.section[1]}" if tags.shared else "",
        separator="\n",
        trigger=tags.section[0],
        arguments=partial(_grammar, tags=tags),
        loose=True,
        markers=tags.markers,
    )


def _read(reader: Reader, tags: Tags, stop: re.Pattern[str]) -> Reading[None]:
    opening, closing = tags.section
    begins = [opening, *([tags.function[0]] if tags.alone else [])]
    while found := (yield from reader.text_until(*begins)):
        if found != opening:
            reader.unread(found)
        begun = reader.num_calls
        whole = yield from _call(reader, tags, stop)
        while whole and tags.function[0]:
            whole = yield from _call(reader, tags, stop)
        if whole is False or reader.num_calls == begun:
            reader.reject()
        else:
            yield from reader.skip(closing)
            reader.mark()


def _call(reader: Reader, tags: Tags, stop: re.Pattern[str]) -> Reading[bool | None]:
    """Reads a call. False: it is broken. None: none begins here.

    Its end may be missing where what ends the section follows, or another call.
    """
    ends = tuple(filter(None, (tags.end, tags.section[1], tags.function[0])))
    if tags.function[0] and not (yield from reader.skip(tags.function[0])):
        return None
    word = yield from reader.word_until(*([_last(tags.function)] if tags.function[1] else (tags.key[0], ends[0])))
    if word is None:
        return False
    if not tags.function[1]:
        reader.unread(word[1])
    if not reader.knows(name := word[0].split('"')[0].strip()):
        return False
    schema = schema_of(reader.tools[name])
    properties = schema["properties"]
    arguments: dict[str, Any] = {}
    while (yield from reader.skip(tags.key[0])):
        if (word := (yield from reader.word_until(_last(tags.key)))) is None:
            return False
        key = word[0].split('"')[0].strip()
        if tags.value[0] and not (yield from reader.skip(tags.value[0])):
            return False
        text = yield from _value(reader, tags, stop, properties.keys() - arguments.keys() - {key})
        if text is None:
            return False
        is_text = tags.flags[0] and tags.flags[0] in word[0]
        arguments[key] = text if is_text else value_of(text, properties.get(key), schema)
    found = yield from reader.skip(*ends)
    if not found or (written := as_json(arguments)) is None:
        return False
    if found != tags.end:
        reader.unread(found)
    reader.call(name, written)
    return True


def _value(reader: Reader, tags: Tags, stop: re.Pattern[str], keys: set[str]) -> Reading[str | None]:
    """Reads a value and what ends it, or up to what shows that its end is missing: one of these `keys`, or the end of
    a call. None: it never ends."""

    def accepts(found: re.Match[str], is_all: bool) -> bool:
        return found["key"] in keys if found["key"] else bool(found["value"] or found["next"]) or is_all

    if tags.quotes[0] and (yield from reader.skip(tags.quotes[0])):
        quoted = yield from reader.up_to(tags.quotes[1])
        return quoted if quoted is not None and (yield from reader.skip(tags.value[1])) else None
    if (found := (yield from reader.up_to_match(stop, 2 * _LONGEST, accepts))) is None:
        return None
    text, is_closed = found[0], bool(found[1]["value"])
    if is_closed:
        yield from reader.skip(tags.value[1])
    if tags.lines:
        text = text.removeprefix("\n")
    return text.removesuffix("\n") if tags.lines or not is_closed else text


def _stop(tags: Tags) -> re.Pattern[str]:
    """What ends a value: the tag for it, another key, or a call's end where something follows that only calls have
    around them. Texts may hold the latter two in other places."""
    end = tags.end or tags.section[1]
    around = "|".join(map(re.escape, sorted({*tags.section, tags.function[0]} - {"", end})))
    return re.compile(
        rf"(?P<value>{re.escape(tags.value[1])})"
        rf'|{re.escape(tags.key[0])}(?P<key>[^<>"\n]{{1,{_LONGEST}}})(?=[<>"\n])'
        rf"|{re.escape(end)}(?=\s{{0,8}}(?:(?P<next>{around})|\Z))"
    )


def _last(tags: tuple[str, str]) -> str:
    """What ends a name or a key, before which other attributes may stand."""
    return tags[1].removeprefix('"')


@lru_cache(maxsize=256)
def schema_of(text: str) -> dict[str, Any]:
    """A tool's schema, whose `properties` is an object."""
    found = msgspec.json.decode(text)
    schema = found if isinstance(found, dict) else {}
    return schema if isinstance(schema.get("properties"), dict) else {**schema, "properties": {}}


def _grammar(schema: dict[str, Any], tags: Tags) -> Grammar:
    """Arguments as `lark` writes them. A text ends where value[1] first comes."""
    gap = "\n" if tags.value[0] else ""
    return {
        "type": "keywords",
        **members(schema),
        "is_bare": True,
        "any": not schema.get("properties") and schema.get("additionalProperties") is not False,
        "before": tags.key[0],
        "signs": [f"{tags.key[1][:-1]}{flag}{tags.key[1][-1:]}{gap}{tags.value[0]}" for flag in tags.flags],
        "around": "\n" if tags.lines else "",
        "after": tags.value[1],
        "rest": "\n",
        "separator": "",
        "max_whitespace_cnt": MAX_WHITESPACE,
    }
