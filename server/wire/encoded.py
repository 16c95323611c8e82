"""A long answer as JSON, in pieces: no other thread of the process runs while C writes one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

# Entries of a list that are written at once: of numbers, of texts, and of what may be long by itself, as vectors are.
NUMBERS, TEXTS, OTHERS = 8192, 1024, 4
SHORT = 32  # entries of every list of an answer that is written at once


def encode(content: Any) -> memoryview:
    """As msgspec does; dicts with texts as names, and lists, are taken apart where some list is not short."""
    if not isinstance(content, dict | list) or _is_short(content):
        return memoryview(msgspec.json.encode(content))
    written = bytearray()  # grows where it is: to join pieces in the end would take as long as to write them at once
    for piece in pieces(content):
        written += piece
    return memoryview(written)


def _is_short(content: dict[str, Any] | list[Any]) -> bool:
    if isinstance(content, list) and len(content) > SHORT:
        return False
    for value in content.values() if isinstance(content, dict) else content:  # every answer comes here: no generator
        if isinstance(value, dict | list) and not _is_short(value):
            return False
    return True


def pieces(content: Any) -> Iterator[bytes]:
    if isinstance(content, dict):
        separator = b"{"
        for name, value in content.items():
            yield separator + msgspec.json.encode(name) + b":"
            yield from pieces(value)
            separator = b","
        yield b"}" if content else b"{}"
    elif isinstance(content, list):
        yield from _entries(content)
    else:
        yield msgspec.json.encode(content)


def _entries(values: list[Any]) -> Iterator[bytes]:
    separator, start = b"[", 0
    while start < len(values):
        chunk = values[start : start + NUMBERS]
        if not all(type(value) in (int, float) for value in chunk):
            chunk = chunk[:TEXTS] if all(type(value) is str for value in chunk[:TEXTS]) else chunk[:OTHERS]
        start += len(chunk)
        yield separator
        if len(values) <= OTHERS:  # so few may hold nearly all of the answer, each
            for place, value in enumerate(chunk):
                yield from (b",",) if place else ()
                yield from pieces(value)
        else:
            yield msgspec.json.encode(chunk)[1:-1]
        separator = b","
    yield b"]" if values else b"[]"
