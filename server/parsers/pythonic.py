"""Llama 3.2 and 4, ToolACE: the message is a Python list of calls, [get_weather(city='Paris', days=3)]."""

from __future__ import annotations

import ast
from typing import Any

from .formats import MAX_WHITESPACE, Detection, Grammar, ToolFormat, members
from .python_text import as_json, literal, parsed
from .reader import Reader
from .text_reader import Reading

START, END = "<|python_start|>", "<|python_end|>"


def read(reader: Reader) -> Reading[None]:
    yield from reader.skip(START)
    reader.mark()
    if (yield from reader.peek()) != "[":
        return
    if (yield from calls(reader)):
        yield from reader.skip(END)
    else:
        reader.reject()


def calls(reader: Reader) -> Reading[bool]:
    """Reads a list of calls. False: there is none, or it breaks off."""
    yield from reader.skip("[")
    while (yield from call(reader)):
        if (yield from reader.skip(",", "]")) != ",":
            return True
        if (yield from reader.skip("]")):  # after a last comma
            return True
    return False


def call(reader: Reader) -> Reading[bool]:
    word = yield from reader.word_until("(")
    if word is None or not reader.knows(name := word[0].strip()):
        return False
    source = yield from reader.bracketed()
    arguments = None if source is None else keywords(source)
    if arguments is None:
        return False
    reader.call(name, arguments)
    return True


def keywords(source: str) -> str | None:
    """The JSON object that keyword arguments in parentheses stand for. None: they are no literals."""
    call = parsed(f"f({source})")
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        return None
    try:
        return as_json({str(keyword.arg): literal(keyword.value) for keyword in call.keywords})
    except (ValueError, RecursionError):
        return None


def grammar(schema: dict[str, Any]) -> Grammar:
    """Keyword arguments, their values written as JSON."""
    return {
        "type": "keywords",
        **members(schema),
        "before": "",
        "signs": ["=", "="],
        "separator": ", ",
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


PYTHONIC = ToolFormat(
    name="pythonic",
    aliases=("llama4_pythonic",),
    detection=Detection(any=("func_name1(", START)),
    read=read,
    opening="[",
    begin=lambda name: f"{name}(",
    end=")",
    separator=", ",
    closing="]",
    arguments=grammar,
    markers=(START, END),
)
FORMATS = (PYTHONIC,)
