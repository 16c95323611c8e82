"""Arguments that are written without quotes: which value a text stands for, by the schema of the argument."""

from __future__ import annotations

from typing import Any

import msgspec

from .json_text import kind_of
from .python_text import literal, parsed

_MAX_DEPTH = 8  # of references and alternatives within each other: beyond, a schema says nothing
_MAX_BRANCHES = 64
_MAX_VISITS = 256  # of schemas within one: alternatives that refer to alternatives multiply
_MAX_LOOKS = 1 << 12  # that is as many visits, or more of what takes less time
_NOTHING = object()


class _TooManyError(Exception):
    """There are more schemas within one than are looked at."""


class Looks:
    """How many are left. One at a schema counts as several at pairs of them or at what they list."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, num: int) -> None:
        self.left -= num
        if self.left < 0:
            raise _TooManyError


def branches(schema: Any, root: Any, shared: Looks | None = None) -> list[dict[str, Any]]:
    """The schemas that a value may follow instead of each other, none of which only names others: `anyOf` and `oneOf`
    are spread out, `$ref` is followed within `root`, `allOf` is put together. Empty: it does not say, or is too much
    to look through, or `shared`, of which others took their part, is used up."""
    most = _MAX_LOOKS if shared is None else max(min(_MAX_LOOKS, shared.left), 0)
    looks = Looks(most)
    try:
        return _spread(schema, root, 0, looks)
    except _TooManyError:
        return []
    finally:
        if shared is not None:
            shared.left -= most - looks.left


def _spread(schema: Any, root: Any, depth: int, looks: Looks) -> list[dict[str, Any]]:
    """`looks`: shared by all that this schema leads to."""
    looks.spend(_MAX_LOOKS // _MAX_VISITS)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return []
    rest = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}
    found = [rest]
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            spread = [one for option in options for one in _spread(option, root, depth + 1, looks) or [{}]]
            found = _both(found, spread, looks)
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            found = _both(found, _spread(part, root, depth + 1, looks), looks)
    if isinstance(reference := schema.get("$ref"), str):
        found = _both(found, _spread(_target(reference, root), root, depth + 1, looks), looks)
    return found


def merged_branches(schema: Any, root: Any) -> dict[str, Any]:
    """What any of the branches says of items and properties."""
    found: dict[str, Any] = {}
    for branch in branches(schema, root):
        found |= branch
    return found


def _both(some: list[dict[str, Any]], others: list[dict[str, Any]], looks: Looks) -> list[dict[str, Any]]:
    """What follows one of some and one of others."""
    if len(some) * len(others) > _MAX_BRANCHES:
        return []
    looks.spend(sum(map(_weight, some)) * len(others) + sum(map(_weight, others)) * len(some))
    made = [{**other, **one} for one in some for other in others or [{}] if _agree(one, other)]
    return made or some


def _weight(schema: dict[str, Any]) -> int:
    listed = schema.get("enum")
    return 1 + (len(listed) if isinstance(listed, list) else 0) // 8


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


def kinds(schema: Any, root: Any = None, shared: Looks | None = None) -> set[str]:
    """The types that a value may have; none where the schema does not say."""
    return _kinds(branches(schema, root, shared))


def _kinds(branches: list[dict[str, Any]]) -> set[str]:
    found = [kinds_of(branch) for branch in branches]
    return set().union(*found) if all(found) else set()


def value_of(text: str, schema: Any, root: Any = None) -> Any:
    """What an argument's text stands for: itself where it may be that text, unless it is null, or a list or an object
    that may stand there as well; else JSON, or what Python would write."""
    found = branches(schema, root)
    allowed = _kinds(found)
    if allowed == {"string"}:
        return text
    bare = text.strip()
    if "null" in allowed and bare in ("null", "None"):
        return None
    if "string" in allowed and bare[:1] not in ("{", "[") and _may_be(text, found):
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
