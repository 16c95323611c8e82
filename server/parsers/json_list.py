"""Calls as a JSON list: what a grammar makes any model write whose own format is not known, and, after a word of their
own, what many models write."""

from __future__ import annotations

import json

from .formats import ToolFormat
from .reader import Reader
from .text_reader import Reading


def json_calls(reader: Reader) -> Reading[bool]:
    """Reads a list of calls, or calls without the brackets around them. False: there is none, or it breaks off."""
    bracket = yield from reader.skip("[")
    while (yield from reader.json_call()):
        if not (yield from reader.skip(",")) and (bracket or (yield from reader.peek()) != "{"):
            if bracket:
                yield from reader.skip("]")
            return True
    return False


def read(reader: Reader) -> Reading[None]:
    if (yield from reader.peek()) == "[" and not (yield from json_calls(reader)):
        reader.reject()


def json_begin(name: str, arguments: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{arguments}": '


GENERIC = ToolFormat(
    name="json",
    read=read,
    opening="[",
    begin=lambda name: json_begin(name, "parameters"),
    end="}",
    separator=", ",
    closing="]",
    begins_answers=True,
)
FORMATS = (GENERIC,)
