"""MiniMax M3: arguments between tags of their own names, lists and objects as tags within tags. Each tag has the same
mark before it, so texts need no escapes."""

from __future__ import annotations

import re
from typing import Any

from .formats import MAX_WHITESPACE, Detection, Grammar, ToolFormat, members
from .python_text import as_json
from .reader import Reader
from .tagged import schema_of
from .text_reader import Reading
from .values import kinds, merged_branches, value_of

MARK = "]<]minimax[>["
BEGIN, END, INVOKE, INVOKED = f"{MARK}<tool_call>", f"{MARK}</tool_call>", f'{MARK}<invoke name="', f"{MARK}</invoke>"
_TAG = re.compile(re.escape(MARK) + r"<(/?)([^<>\n]{1,200})>")
_MAX_DEPTH = 64


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(BEGIN)):
        before, whole = reader.num_calls, True
        while whole and (yield from reader.skip(INVOKE)):
            word = yield from reader.word_until('">')
            source = None if word is None or not reader.knows(word[0]) else (yield from reader.up_to(INVOKED))
            written = None if word is None or source is None else _arguments(source, schema_of(reader.tools[word[0]]))
            if whole := word is not None and written is not None:
                reader.call(word[0], written)
        if whole and reader.num_calls > before:
            yield from reader.skip(END)
            reader.mark()
        else:
            reader.reject()


def _arguments(source: str, schema: dict[str, Any]) -> str | None:
    """The JSON object that these tags are. None: they do not fit into each other."""
    opened: list[tuple[str, list[tuple[str, Any]], int]] = [("", [], 0)]  # name, what is in it, where its text begins
    for tag in _TAG.finditer(source):
        if not tag[1]:
            if len(opened) > _MAX_DEPTH:
                return None
            opened.append((tag[2], [], tag.end()))
            continue
        name, children, start = opened.pop()
        if not opened or name != tag[2]:
            return None
        opened[-1][1].append((name, children or source[start : tag.start()]))
    return None if len(opened) > 1 else as_json(_value(opened[0][1], schema, schema, is_object=True))


def _value(found: list[tuple[str, Any]] | str, schema: Any, root: Any, is_object: bool = False) -> Any:
    if isinstance(found, str):
        allowed = kinds(schema, root)
        if not found and allowed & {"array", "object"}:
            return [] if "array" in allowed else {}
        return value_of(found, schema, root)
    known = merged_branches(schema, root)
    if not is_object and ("array" in kinds(schema, root) or all(name == "item" for name, _ in found)):
        return [_value(one, known.get("items"), root) for _, one in found]
    properties = known.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    return {name: _value(one, properties.get(name), root) for name, one in found}


def grammar(schema: dict[str, Any]) -> Grammar:
    return {
        "type": "keywords",
        **members(schema),
        "is_bare": True,
        "before": f"{MARK}<",
        "signs": [">", ">"],
        "after": f"{MARK}</{{}}>",
        "structures": "until",
        "separator": "",
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


FORMATS = (
    ToolFormat(
        name="minimax_m3",
        detection=Detection(any=(MARK,)),
        read=read,
        opening=f"{BEGIN}\n",
        begin=lambda name: f'{INVOKE}{name}">',
        end=f"{INVOKED}\n",
        closing=END,
        trigger=BEGIN,
        arguments=grammar,
        loose=True,
    ),
)
