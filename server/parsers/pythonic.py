"""Llama 3.2 and 4, ToolACE: the message is a Python list of calls, [get_weather(city='Paris', days=3)]."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from .formats import MAX_WHITESPACE, Detection, Grammar, ToolFormat
from .reader import Reader, Reading

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CONSTANTS = {"true": True, "false": False, "null": None}  # which models that know JSON better write
MAX_LENGTH = 100_000  # characters of one call


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
    while (yield from _call(reader)):
        if not (yield from reader.skip(",")):
            yield from reader.skip("]")
            return True
    return False


def _call(reader: Reader) -> Reading[bool]:
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
    if len(source) > MAX_LENGTH:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # "\\d" in a string that is not raw
            call = ast.parse(f"f({source})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON's way to write the rarer characters
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """As ast.literal_eval, but only what JSON has, and its names too. Raises ValueError."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | bool | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    raise ValueError("no JSON")


def grammar(schema: dict[str, Any]) -> Grammar:
    """Keyword arguments in the order of the schema's properties, their values written as JSON."""
    properties = schema.get("properties", {})
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if definitions:
        properties = {k: {**one, **definitions} if isinstance(one, dict) else one for k, one in properties.items()}
    return {
        "type": "keywords",
        "properties": properties,
        "required": [name for name in schema.get("required", ()) if name in properties],
        "sign": "=",
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
