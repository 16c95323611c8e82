"""OLMo 3: calls as Python writes them, one a line, between <function_calls> and </function_calls>."""

from __future__ import annotations

from dataclasses import replace

from .formats import Detection
from .pythonic import PYTHONIC, call
from .reader import Reader
from .text_reader import Reading

BEGIN, END = "<function_calls>", "</function_calls>"


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(BEGIN)):
        before, found = reader.num_calls, ""
        while not (found := (yield from reader.skip(END))) and (yield from call(reader)):
            yield from reader.skip(",", ";")
        if reader.num_calls == before or (not found and (yield from reader.peek())):
            reader.reject()


FORMATS = (
    replace(
        PYTHONIC,
        name="olmo3",
        aliases=(),
        detection=Detection(any=(BEGIN,), none=("<invoke", "DSML", "atem:")),
        read=read,
        opening=f"{BEGIN}\n",
        separator="\n",
        closing=f"\n{END}",
        trigger=BEGIN,
        loose=True,
        markers=(BEGIN, END),
    ),
)
