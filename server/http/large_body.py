"""A large body as JSON, for a thread: in pieces, since no other thread runs while C reads one.

Its values are counted before any is made. Text and token ids may fill a body; objects, lists and strings, which cost
far more than their bytes, are limited by number.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ..errors import ApiError, bad_request, shorten
from .body import check_keys, invalid, parse

# A body below all of these is read, and validated, in the few milliseconds that the event loop can spare.
LARGE = 256 << 10  # bytes
MANY_VALUES = 1024  # objects, lists and strings
MANY_COMMAS = 8192
MAX_VALUES = 1 << 17  # objects, lists and strings; also numbers that are in no list of numbers
MAX_NUMBERS = 4 << 20  # in lists of numbers
PIECE = 64 << 10  # bytes, or entries of a list
DEPTH = 4  # levels that are taken apart: what is further in has few values

_OTHER = bytes(set(range(256)) - set(b'"{}[],:'))
_NUMBERS = re.compile(rb"\[,+\]")


def work_of(raw: bytes) -> int:
    """What reading and validating it costs, in characters that are tokenised in the same time: some 5 µs a value; 0:
    hardly anything. Where there are many bytes, which to count takes long too, the worst is taken for granted."""
    if len(raw) > LARGE:
        return len(raw) >> 2
    num_values = raw.count(b"{") + raw.count(b"[") + (raw.count(b'"') >> 1)  # or fewer: text may have such characters
    num_commas = raw.count(b",")
    if num_values <= MANY_VALUES and num_commas <= MANY_COMMAS:
        return 0
    return (len(raw) >> 4) + 8 * num_values + (num_commas >> 2)


def decode(raw: bytes) -> Any:
    """What body.decode returns. Raises ApiError (400)."""
    num_keys = check(raw)
    try:
        value = _read(raw, DEPTH)
        if (has_twice := _num_keys(value) != num_keys) and len(raw) <= LARGE:
            check_keys(raw)  # of a larger one it would take all of the interpreter's time for too long
    except (msgspec.DecodeError, ValueError) as error:
        raise invalid(shorten(str(error))) from None
    except RecursionError:
        raise invalid("it is nested too deeply") from None
    if has_twice:
        raise invalid("a key of an object comes twice")
    return value


def check(raw: bytes) -> int:
    """The number of keys. Raises ApiError (400) where there are too many values; of what is no JSON it says nothing."""
    shape = bytearray()  # the structure alone, with one quote for each string
    num_keys = num_values = start = 0
    inside = False  # a string
    while start < len(raw):
        piece = raw[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what a backslash escapes stays with it
            piece = raw[start : start + PIECE + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER).split(b'"')
        outside = parts[inside::2]
        piece = b'"'.join([b"", *outside] if inside else outside)
        inside ^= len(parts) % 2 == 0
        num_keys += piece.count(b":")
        num_values += piece.count(b'"') + piece.count(b"{") + piece.count(b"[")
        shape += piece.replace(b":", b"")
        if num_values > MAX_VALUES or len(shape) > 4 * MAX_VALUES + MAX_NUMBERS:
            break
    num_single = _NUMBERS.sub(b"", shape).count(b",")
    if max(num_values, num_single) > MAX_VALUES:
        raise _too_many("objects, lists, strings and single values", MAX_VALUES)
    if shape.count(b",") > MAX_NUMBERS:
        raise _too_many("numbers", MAX_NUMBERS)
    return num_keys


def _too_many(what: str, most: int) -> ApiError:
    message = f"The body has more than {most} {what}, which is the most for one request; send several requests."
    return bad_request(message, None, "too_many_values")


def _read(raw: bytes, depth: int) -> Any:
    if len(raw) <= PIECE or not depth:
        return parse(raw)
    raw = raw.strip()
    if raw.startswith(b"{"):
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {name: _read(bytes(member), depth - 1) for name, member in members.items()}
    if not raw.startswith(b"["):
        return parse(raw)
    if any(char in raw for char in (b'"', b"{")) or raw.find(b"[", 1) > 0:
        return _read_items(msgspec.json.decode(raw, type=list[msgspec.Raw]), depth - 1)
    numbers: list[Any] = []
    if not raw.endswith(b"]"):
        parse(raw)  # says where it ends
    start = 1
    while (end := raw.find(b",", start + PIECE)) > 0:
        numbers += _entries(raw[start:end])
        start = end + 1
    return numbers + (_entries(raw[start:-1]) if start > 1 else parse(raw))


def _entries(raw: bytes) -> list[Any]:
    """Of a list that goes on before or behind them: at least one."""
    entries: list[Any] = parse(b"[%b]" % raw)
    if not entries:
        raise ValueError("a list has a comma without an entry")
    return entries


def _read_items(items: list[msgspec.Raw], depth: int) -> list[Any]:
    values: list[Any] = []
    waiting: list[bytes] = []
    size = 0
    for item in map(bytes, items):
        waiting.append(item)
        size += len(item)
        if size > PIECE:
            if len(item) > PIECE:
                waiting.pop()
            values += parse(b"[%b]" % b",".join(waiting))
            if len(item) > PIECE:
                values.append(_read(item, depth))
            waiting, size = [], 0
    return values + parse(b"[%b]" % b",".join(waiting))


def _num_keys(value: Any) -> int:
    """Of all objects within."""
    found = 0
    stack: list[Any] = [[value]]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            found += len(item)
            item = list(item.values())
        for start in range(0, len(item), PIECE):
            part = item[start : start + PIECE]
            if not set(map(type, part)).isdisjoint((dict, list)):
                stack += [entry for entry in part if isinstance(entry, dict | list)]
    return found
