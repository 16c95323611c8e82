"""Regular expressions that match a few texts only: which ones."""

from __future__ import annotations

import re
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MOST = 64  # texts


class _ManyError(Exception):
    """There are more, or nobody here can tell."""


def texts_of(pattern: str) -> list[str] | None:
    """All texts in which the pattern is found, where it is anchored at both ends and they are 64 at most; else None."""
    try:
        found = list(parser.parse(pattern))
        if len(found) < 2 or found[0] != (op.AT, op.AT_BEGINNING) or found[-1] != (op.AT, op.AT_END):
            return None
        return list(dict.fromkeys(_sequence(found[1:-1])))
    except (_ManyError, re.error, RecursionError, OverflowError):
        return None


def _sequence(parts: Any) -> list[str]:
    texts = [""]
    for kind, value in parts:
        texts = _joined(texts, _one(kind, value))
    return texts


def _one(kind: Any, value: Any) -> list[str]:
    if kind is op.LITERAL:
        return [chr(value)]
    if kind is op.IN:
        return [text for inner in value for text in _one(*inner)]
    if kind is op.RANGE and value[1] - value[0] < MOST:
        return [chr(code) for code in range(value[0], value[1] + 1)]
    if kind is op.SUBPATTERN and not value[1] and not value[2]:
        return _sequence(value[3])
    if kind is op.BRANCH:
        return [text for branch in value[1] for text in _sequence(branch)]
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT) and value[1] is not op.MAXREPEAT and value[1] <= MOST:
        once, texts, found = _sequence(value[2]), [""], []
        for count in range(value[1] + 1):
            found += texts if count >= value[0] else []
            texts = _joined(texts, once)
        return found
    raise _ManyError


def _joined(left: list[str], right: list[str]) -> list[str]:
    if len(left) * len(right) > MOST:
        raise _ManyError
    return [one + other for one in left for other in right]
