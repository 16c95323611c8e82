"""Kimi K3: an answer is elements that begin with <|open|>name attributes<|sep|> and end with <|close|>name<|sep|>:
think, response, and tools with a call in it for each, whose arguments are elements too."""

from __future__ import annotations

import re
from typing import Any

from .formats import MAX_WHITESPACE, Detection, Grammar, ReasoningFormat, ToolFormat, const, members, sequence
from .json_text import as_object
from .python_text import as_json
from .reader import Reader
from .tagged import schema_of
from .text_reader import Reading
from .values import value_of

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MARKERS = (OPEN, CLOSE, SEP)
_CALL = re.compile(r'call tool="([^"]{1,200})"(?: index="\d{1,4}")?')
_ARGUMENT = re.compile(r'argument key="([^"]{1,200})"(?: type="(\w{1,20})")?')
_DETECTION = Detection(any=("open_tag('call'",))


def begun(name: str) -> str:
    return f"{OPEN}{name}{SEP}"


def ended(name: str) -> str:
    return f"{CLOSE}{name}{SEP}"


def read_elements(reader: Reader, thinks: bool) -> Reading[None]:
    """`thinks`: what is in the element think is reasoning."""
    while found := (yield from reader.text_until(OPEN, CLOSE)):
        word = yield from reader.word_until(SEP)
        name = "" if word is None else word[0].partition(" ")[0]
        if name in ("think", "response"):
            reader.turn(thinking=thinks and found == OPEN and name == "think")
        elif name == "call" and found == OPEN:
            if word is None or not (yield from _call(reader, word[0])):
                reader.reject()
        elif name not in ("tools", "message", "call"):
            reader.reject()


def _call(reader: Reader, head: str) -> Reading[bool]:
    called = _CALL.fullmatch(head)
    if called is None or not reader.knows(name := _unescaped(called[1])):
        return False
    schema = schema_of(reader.tools[name])
    arguments: dict[str, Any] = {}
    written: str | None = None
    while (yield from reader.skip(OPEN)):
        word = yield from reader.word_until(SEP)
        if word is None:
            return False
        inner = word[0].partition(" ")[0]
        value = yield from reader.up_to(ended(inner))
        if value is None:
            return False
        argument = _ARGUMENT.fullmatch(word[0])
        if inner == "json":
            written = as_object(value)
        elif argument is not None:
            key = _unescaped(argument[1])
            is_text = argument[2] == "string"
            arguments[key] = value if is_text else value_of(value, schema["properties"].get(key), schema)
        else:
            return False
    if not (yield from reader.skip(ended("call"))):
        return False
    written = written or as_json(arguments)
    if written is None:
        return False
    reader.call(name, written)
    return True


def _unescaped(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")


def _read(reader: Reader, opened: bool | None) -> Reading[None]:
    if opened:
        reader.turn(thinking=True)
    yield from read_elements(reader, thinks=True)


def grammar(schema: dict[str, Any]) -> Grammar:
    return {
        "type": "keywords",
        **members(schema),
        "is_bare": True,
        "before": f'{OPEN}argument key="',
        "signs": [f'" type="string"{SEP}', f'" type="{{}}"{SEP}'],
        "any": not schema.get("properties") and schema.get("additionalProperties") is not False,
        "after": ended("argument"),
        "separator": "",
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


FORMATS = (
    ToolFormat(
        name="kimi_k3",
        detection=_DETECTION,
        read=lambda reader: read_elements(reader, thinks=False),
        # The prompt, or what ends the reasoning, has begun the response.
        opening=f"{ended('response')}{begun('tools')}",
        begin=lambda name: f'{OPEN}call tool="{name}" index="',
        after_name=sequence({"type": "regex", "pattern": "[1-9][0-9]{0,2}"}, const(f'"{SEP}')),
        end=ended("call"),
        closing=ended("tools"),
        trigger=f"{ended('response')}{begun('tools')}",
        arguments=grammar,
        markers=MARKERS,
    ),
    ReasoningFormat(
        name="kimi_k3",
        begin=begun("think"),
        end=ended("think"),
        between=begun("response"),
        channels=_read,
        detection=_DETECTION,
        special=MARKERS,
    ),
)
