"""A long answer as JSON, in pieces: no other thread of the process runs while C writes one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

PIECE = 256 << 10  # bytes that a list's entries may have come to before they are written
ENTRIES = 4096  # of a list, at most, in a piece


def encode(content: Mapping[str, Any] | list[Any]) -> memoryview:
    """As msgspec does; a list, by itself or as a member, is taken apart."""
    written = bytearray()  # grows where it is: to join pieces in the end would take as long as to write them at once
    for piece in _members(content) if isinstance(content, Mapping) else _entries(content):
        written += piece
    return memoryview(written)


def _members(content: Mapping[str, Any]) -> Iterator[bytes]:
    separator = b"{"
    for name, value in content.items():
        yield separator + msgspec.json.encode(name) + b":"
        yield from _entries(value) if isinstance(value, list) else (msgspec.json.encode(value),)
        separator = b","
    yield b"}" if content else b"{}"


def _entries(values: list[Any]) -> Iterator[bytes]:
    separator = b"["
    # An entry may be a vector of thousands of numbers.
    step = max(1, min(ENTRIES, PIECE // len(msgspec.json.encode(values[0])))) if values else 1
    for start in range(0, len(values), step):
        yield separator
        yield msgspec.json.encode(values[start : start + step])[1:-1]
        separator = b","
    yield b"]" if values else b"[]"
