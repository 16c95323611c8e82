"""LFM 2: <|tool_call_start|>, a Python list of calls, <|tool_call_end|>."""

from __future__ import annotations

from dataclasses import replace

from .formats import Detection
from .pythonic import PYTHONIC, calls
from .reader import Reader
from .text_reader import Reading

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(BEGIN)):
        if (yield from calls(reader)):
            yield from reader.skip(END)
        else:
            reader.reject()


FORMATS = (
    replace(
        PYTHONIC,
        name="lfm2",
        aliases=(),
        detection=Detection(any=("<|tool_list_start|>", BEGIN)),
        read=read,
        opening=f"{BEGIN}[",
        closing=f"]{END}",
        trigger=BEGIN,
        markers=(BEGIN, END),
    ),
)
