"""For models whose own format is not known: a JSON list of calls, which a grammar makes any model write."""

from __future__ import annotations

import json

from .formats import ToolFormat
from .reader import Reader, Reading


def read(reader: Reader) -> Reading[None]:
    if not (yield from reader.skip("[")):
        return
    while (yield from reader.json_call()):
        if not (yield from reader.skip(",")):
            yield from reader.skip("]")
            return
    reader.reject()


GENERIC = ToolFormat(
    name="json",
    read=read,
    opening="[",
    begin=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ',
    end="}",
    separator=", ",
    closing="]",
)
FORMATS = (GENERIC,)
