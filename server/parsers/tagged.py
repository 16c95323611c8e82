"""Calls whose arguments stand between tags, each by itself: GLM 4.5, Qwen 3 Coder. Texts are written as they are, other
values as JSON: which of the two it is, the tool's schema says."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import msgspec

from .formats import MAX_WHITESPACE, Detection, Grammar, ToolFormat
from .json_text import kind_of
from .reader import Reader, Reading

BEGIN, END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"


def value_of(text: str, schema: Any) -> Any:
    """What an argument's text stands for."""
    types = kinds(schema)
    if types == {"string"}:
        return text
    try:
        value = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return text if "string" in types and not types & kind_of(value) else value


def kinds(schema: Any) -> set[str]:
    """The types that a schema names; none where it does not say."""
    if not isinstance(schema, dict):
        return set()
    types = schema.get("type")
    if types is None and isinstance(options := schema.get("enum"), list):
        return {"string"} if all(isinstance(option, str) for option in options) else set()
    return {name for name in (types if isinstance(types, list) else [types]) if isinstance(name, str)}


@lru_cache(maxsize=256)
def _properties(schema: str) -> dict[str, Any]:
    found = msgspec.json.decode(schema)
    properties = found.get("properties") if isinstance(found, dict) else None
    return properties if isinstance(properties, dict) else {}


def _written(reader: Reader, name: str, arguments: dict[str, str]) -> bool:
    """A call with these texts as its arguments. False: they are no text that JSON can hold."""
    properties = _properties(reader.tools[name])
    values = {key: value_of(text, properties.get(key)) for key, text in arguments.items()}
    try:
        reader.call(name, json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return False
    return True


def _calls(one: Callable[[Reader], Reading[bool]]) -> Callable[[Reader], Reading[None]]:
    def read(reader: Reader) -> Reading[None]:
        while (yield from reader.text_until(BEGIN)):
            if not (yield from one(reader)):
                reader.reject()
            else:
                yield from reader.skip(END)
                reader.mark()

    return read


def _glm(reader: Reader) -> Reading[bool]:
    """name <arg_key>key</arg_key> <arg_value>value</arg_value> …"""
    word = yield from reader.word_until(_KEY, END)
    if word is None or not reader.knows(name := word[0].strip()):
        return False
    reader.unread(word[1])
    arguments: dict[str, str] = {}
    while (yield from reader.skip(_KEY)):
        key = yield from reader.word_until(_KEY_END)
        if key is None or not (yield from reader.skip(_VALUE)):
            return False
        if (value := (yield from reader.up_to(_VALUE_END))) is None:
            return False
        arguments[key[0].strip()] = value
    return _written(reader, name, arguments)


def _qwen(reader: Reader) -> Reading[bool]:
    """<function=name> <parameter=key> value </parameter> … </function>, a line end on either side of the value"""
    if not (yield from reader.skip(_FUNCTION)):
        return False
    word = yield from reader.word_until(">")
    if word is None or not reader.knows(name := word[0].strip()):
        return False
    arguments: dict[str, str] = {}
    while (yield from reader.skip(_PARAMETER)):
        key = yield from reader.word_until(">")
        if key is None or (value := (yield from reader.up_to(_PARAMETER_END))) is None:
            return False
        arguments[key[0].strip()] = value.removeprefix("\n").removesuffix("\n")
    return bool((yield from reader.skip(_FUNCTION_END))) and _written(reader, name, arguments)


def grammar(schema: dict[str, Any], *, before: str, sign: str, after: str, rest: str) -> Grammar:
    """Arguments in the order of the schema's properties: `before`, name, `sign`, value, `after`, `rest`. A text ends
    where `after` first comes.
    """
    properties = schema.get("properties") or {}
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if definitions:
        properties = {k: {**one, **definitions} if isinstance(one, dict) else one for k, one in properties.items()}
    return {
        "type": "keywords",
        "properties": properties,
        "required": [name for name in schema.get("required", ()) if name in properties],
        "texts": [name for name, one in properties.items() if kinds(one) == {"string"}],
        "any": not properties and schema.get("additionalProperties") is not False,
        "before": before,
        "sign": sign,
        "after": after,
        "rest": rest,
        "separator": "",
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


FORMATS = (
    ToolFormat(
        name="glm45",
        aliases=("glm47", "glm4_moe"),
        detection=Detection(any=(_KEY,)),
        read=_calls(_glm),
        begin=lambda name: f"{BEGIN}{name}\n",
        end=END,
        separator="\n",
        trigger=BEGIN,
        arguments=partial(grammar, before=_KEY, sign=f"{_KEY_END}\n{_VALUE}", after=_VALUE_END, rest="\n"),
        markers=(BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END),
    ),
    ToolFormat(
        name="qwen3_coder",
        aliases=("qwen3_xml",),
        detection=Detection(any=(_FUNCTION,)),
        read=_calls(_qwen),
        begin=lambda name: f"{BEGIN}\n{_FUNCTION}{name}>\n",
        end=f"{_FUNCTION_END}\n{END}",
        separator="\n",
        trigger=BEGIN,
        arguments=partial(grammar, before=_PARAMETER, sign=">\n", after=f"\n{_PARAMETER_END}", rest="\n"),
        markers=(BEGIN, END),
    ),
)
