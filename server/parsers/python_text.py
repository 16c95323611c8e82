"""Values as Python writes them: what JSON has, in the syntax of Python's literals."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

MAX_LENGTH = 100_000  # characters of one value, or of one call
_CONSTANTS = {"true": True, "false": False, "null": None}  # which models that know JSON better write

_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)


def parsed(source: str) -> ast.expr | None:
    """The expression that a text is; None: it is none, or too long."""
    if len(source) > MAX_LENGTH:
        return None
    for text in (source, _QUOTED.sub(_escaped, source)):  # some models let a text in quotes go over several lines
        try:
            with warnings.catch_warnings(action="ignore"):  # "\\d" in a string that is not raw
                return ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
    return None


def _escaped(quoted: re.Match[str]) -> str:
    return quoted[0].replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\x00")


def literal(node: ast.expr) -> Any:
    """The value that an expression writes down, of those that JSON has: nothing is computed. Raises ValueError."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | bool | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = literal(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else literal(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(literal, node.values), strict=True))
    raise ValueError("no JSON")


def as_json(value: Any) -> str | None:
    """A value's JSON text; None: there is none, as for infinity and halves of surrogate pairs."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON's way to write the rarer characters
    except (ValueError, TypeError, RecursionError):
        return None
