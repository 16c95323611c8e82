"""JSON as models write it: where a value ends, and whether it is one."""

from __future__ import annotations

from typing import Any

import msgspec

_SCALAR = frozenset("+-.0123456789Eaeflnrstu")  # of numbers, true, false, null


class Scan:
    """Finds where a JSON value ends."""

    def __init__(self) -> None:
        self.bare = False  # it is neither quoted nor bracketed
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._quoted = False
        self._escaped = False

    def ends_with(self, char: str) -> bool | None:
        """True: this is the last character, or the first after a bare value. False: it cannot follow. Else None."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
                return True if not self._closers else None
            elif char < " ":
                return False
        elif self.bare:
            return None if char in _SCALAR else True
        elif char == '"':
            self._quoted = True
        elif char == "{" or char == "[":
            self._closers.append("}" if char == "{" else "]")
        elif char == "}" or char == "]":
            if not self._closers or self._closers.pop() != char:
                return False
            return True if not self._closers else None
        elif not self._closers:
            self.bare = char in _SCALAR
            return None if self.bare else False
        elif char not in _SCALAR and char not in ",: \n\r\t":
            return False
        return None


def as_string(raw: str | None) -> str | None:
    value = _decode(raw)
    return value if isinstance(value, str) else None


def as_object(raw: str | None) -> str | None:
    """The text of a JSON object; some models write it once more as a string, or null for none. None: it is neither."""
    value = _decode(raw)
    if isinstance(value, str):
        raw, value = value, _decode(value)
    if value is None and raw == "null":
        return "{}"
    return raw if isinstance(value, dict) else None


def _decode(raw: str | None) -> Any:
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def kind_of(value: Any) -> set[str]:
    """The types of JSON Schema that a value is of."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
