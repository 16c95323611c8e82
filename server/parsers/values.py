"""Arguments that are written without quotes: which value a text stands for, by the schema of the argument."""

from __future__ import annotations

from typing import Any

import msgspec

from .json_text import kind_of
from .python_text import literal, parsed

_MAX_DEPTH = 8  # of references and alternatives within each other: beyond, a schema says nothing
_MAX_BRANCHES = 64
_NOTHING = object()


def branches(schema: Any, root: Any, depth: int = 0) -> list[dict[str, Any]]:
    """The schemas that a value may follow instead of each other, none of which only names others: `anyOf` and `oneOf`
    are spread out, `$ref` is followed within `root`, `allOf` is put together. Empty: it does not say."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return []
    rest = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}
    found = [rest]
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            found = _both(found, [one for option in options for one in branches(option, root, depth + 1) or [{}]])
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            found = _both(found, branches(part, root, depth + 1))
    if isinstance(reference := schema.get("$ref"), str):
        found = _both(found, branches(_target(reference, root), root, depth + 1))
    return found


def merged_branches(schema: Any, root: Any) -> dict[str, Any]:
    """What any of the branches says of items and properties."""
    found: dict[str, Any] = {}
    for branch in branches(schema, root):
        found |= branch
    return found


def _both(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What follows one of some and one of others."""
    if len(some) * len(others) > _MAX_BRANCHES:
        return []
    made = [{**other, **one} for one in some for other in others or [{}] if _agree(one, other)]
    return made or some


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = kinds_of(one), kinds_of(other)
    return not first or not second or bool(first & second)


def _target(reference: str, root: Any) -> Any:
    target = root
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target if reference.startswith("#") else None


def kinds_of(schema: dict[str, Any]) -> set[str]:
    """The types that one branch names; none where it names none."""
    types = schema.get("type")
    if types is None:
        options = schema.get("enum")
        values = options if isinstance(options, list) else [schema["const"]] if "const" in schema else []
        return set().union(*map(kind_of, values)) if values else set()
    named = {name for name in (types if isinstance(types, list) else [types]) if isinstance(name, str)}
    if schema.get("nullable") is True:
        named.add("null")
    return named | {"integer"} if "number" in named else named


def kinds(schema: Any, root: Any = None) -> set[str]:
    """The types that a value may have; none where the schema does not say."""
    found = [kinds_of(branch) for branch in branches(schema, root)]
    return set().union(*found) if all(found) else set()


def value_of(text: str, schema: Any, root: Any = None) -> Any:
    """What an argument's text stands for: itself where it may be that text, unless it is null, or a list or an object
    that may stand there as well; else JSON, or what Python would write."""
    allowed = kinds(schema, root)
    if allowed == {"string"}:
        return text
    bare = text.strip()
    if "null" in allowed and bare in ("null", "None"):
        return None
    if "string" in allowed and bare[:1] not in ("{", "[") and _may_be(text, branches(schema, root)):
        return text
    read = _read(bare)
    if read is _NOTHING or ("string" in allowed and not allowed & kind_of(read)):
        return text
    return read


def _may_be(text: str, branches: list[dict[str, Any]]) -> bool:
    """Whether this is one of the texts that are listed, or any is allowed."""
    for branch in branches:
        if "string" in kinds_of(branch):
            listed = [branch["const"]] if "const" in branch else branch.get("enum")
            if not isinstance(listed, list) or text in listed:
                return True
    return False


def _read(text: str) -> Any:
    """A value as JSON or Python writes it, or _NOTHING."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    try:
        return _NOTHING if (node := parsed(text)) is None else literal(node)
    except (ValueError, RecursionError):
        return _NOTHING
