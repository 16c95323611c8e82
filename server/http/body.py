"""A request's body as JSON: one that two parsers could read differently is refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from ..errors import ApiError, bad_request, shorten

_KEY = re.compile(rb'"[ \t\r\n]*:')


def _number(text: str) -> float:
    # msgspec's own way takes 10 µs for numbers such as 1e300, thirty times as long as Python's.
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("Number out of range")
    return value


parse = msgspec.json.Decoder(float_hook=_number).decode


def decode(raw: bytes) -> Any:
    """Raises ApiError (400)."""
    try:
        value = parse(raw)
        # A colon after a quote stands behind each key, and may stand in strings: as many as there are keys in `value`
        # means that none came twice. Only where there are more, a second and slower parser has to tell.
        if len(_KEY.findall(raw)) != _num_keys(value):
            check_keys(raw)
        return value
    except (msgspec.DecodeError, ValueError) as error:  # of UTF-8, too
        raise invalid(shorten(str(error))) from None
    except RecursionError:
        raise invalid("it is nested too deeply") from None


def check_keys(raw: bytes) -> None:
    """Raises ValueError, which names a key that comes twice in its object."""
    json.loads(raw, object_pairs_hook=_unique)


def invalid(why: str) -> ApiError:
    return bad_request(f"The body is not valid JSON: {why}.", None, "invalid_json")


def _num_keys(value: Any) -> int:
    """Of all objects within. Those in a list that begins with a plain value are not seen: the count is then too low."""
    if isinstance(value, dict):
        return len(value) + sum(_num_keys(item) for item in value.values() if isinstance(item, dict | list))
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return sum(map(_num_keys, value))
    return 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shorten(twice)!r} comes twice")
    return found
