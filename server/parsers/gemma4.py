"""Gemma 4: <|tool_call>call:name{key:value,…}<tool_call|>, JSON whose keys stand without quotes and whose texts stand
between tokens of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from .formats import Detection, Grammar, ToolFormat, members
from .python_text import as_json
from .reader import Reader
from .text_reader import Reading

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_TOKEN = re.compile(
    rf"{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}|(?P<sign>[{{}}\[\],:])|(?P<bare>[^{{}}\[\],:]+)", re.DOTALL
)
_CONSTANTS = {"None": None, "True": True, "False": False}
_MAX_DEPTH = 64
Token = tuple[str, str]


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(BEGIN)):
        yield from reader.skip("call:")
        word = yield from reader.word_until("{")
        source = None if word is None or not reader.knows(word[0].strip()) else (yield from _source(reader))
        written = None if source is None else arguments("{" + source)
        if word is None or written is None:
            reader.reject()
        else:
            reader.call(word[0].strip(), written)


def _source(reader: Reader) -> Reading[str | None]:
    """What stands before the end that is in no text."""
    pieces, is_text = [], False
    while (piece := (yield from reader.up_to(END))) is not None:
        pieces.append(piece)
        is_text ^= piece.count(QUOTE) % 2 == 1
        if not is_text:
            return END.join(pieces)
    return None


def arguments(source: str) -> str | None:
    """The JSON object that this text is. None: it is none."""
    tokens = ((found.lastgroup or "", found["text"] if found.lastgroup == "text" else found[0].strip())
              for found in _TOKEN.finditer(source))  # fmt: skip
    tokens = (token for token in tokens if token != ("bare", ""))
    try:
        value = _value(tokens, next(tokens), 0)
        return as_json(value) if isinstance(value, dict) and next(tokens, None) is None else None
    except (StopIteration, ValueError):
        return None


def _value(tokens: Iterator[Token], token: Token, depth: int) -> Any:
    """Raises StopIteration, ValueError."""
    kind, text = token
    if kind == "text":
        return text
    if kind == "bare":
        try:
            return _CONSTANTS[text] if text in _CONSTANTS else msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError):
            return text
    if text not in ("{", "[") or depth > _MAX_DEPTH:
        raise ValueError(text)
    found: dict[str, Any] = {}
    elements: list[Any] = []
    close = ("sign", "}" if text == "{" else "]")
    while (token := next(tokens)) != close:
        if text == "{":
            key = token[1].strip('"')
            if token[0] == "sign" or next(tokens) != ("sign", ":"):
                raise ValueError(key)
            found[key] = _value(tokens, next(tokens), depth + 1)
        else:
            elements.append(_value(tokens, token, depth + 1))
        if (token := next(tokens)) == close:
            break
        if token != ("sign", ","):
            raise ValueError(token[1])
    return found if text == "{" else elements


def bare_arguments(schema: dict[str, Any], quote: str = QUOTE) -> Grammar:
    """What stands between the braces; `quote`: around texts."""
    return {
        "type": "keywords",
        **members(schema),
        "is_bare": True,
        "any": not schema.get("properties") and schema.get("additionalProperties") is not False,
        "before": "",
        "signs": [f":{quote}", ":"],
        "after": quote,
        "after_others": "",
        "structures": "unquoted",
        "separator": ",",
        "max_whitespace_cnt": 1,
    }


FORMATS = (
    ToolFormat(
        name="gemma4",
        aliases=("gemma_4",),
        detection=Detection(any=(f"{BEGIN}call:", BEGIN)),
        read=read,
        begin=lambda name: f"{BEGIN}call:{name}{{",
        end=f"}}{END}",
        trigger=BEGIN,
        arguments=bare_arguments,
        markers=(BEGIN, END, QUOTE),
    ),
)
