"""Functionary 3.1: <function=name>{…}</function>, the arguments as a JSON object."""

from __future__ import annotations

from .formats import Detection, ToolFormat
from .reader import Reader
from .text_reader import Reading

BEGIN, END = "<function=", "</function>"


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(BEGIN)):
        word = yield from reader.word_until(">")
        if word is None or not reader.knows(word[0]) or not (yield from reader.arguments(word[0])):
            reader.reject()
            continue
        yield from reader.skip(END)
        reader.mark()


FORMATS = (
    ToolFormat(
        name="functionary_v31",
        detection=Detection(any=("start_tag => `<function`",)),
        read=read,
        begin=lambda name: f"{BEGIN}{name}>",
        end=END,
    ),
)
