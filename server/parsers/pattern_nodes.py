"""What a regular expression says: its syntax as a tree, short texts that it matches, the texts that it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_SOURCE = 2000  # characters of a pattern
MAX_COUNT = 100  # repetitions that are counted
_CLASSES = frozenset("dDsSwW")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_SAMPLES = "x0 \n_-.,:;/\"'#@!?=<>()[]{}é"  # characters to show a class by


class PatternError(ValueError):
    """One short clause: what of a pattern is not supported, or is wrong."""


@dataclass(frozen=True)
class Char:
    """One character of a class: the text of it as `re` has it."""

    source: str

    @cached_property
    def matches(self) -> Callable[[str], Any]:
        try:
            return re.compile(self.source, re.DOTALL).fullmatch
        except (re.error, OverflowError) as error:
            raise PatternError(f"{self.source!r}: {error}") from None


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    options: tuple[Node, ...]  # the first is tried first


@dataclass(frozen=True)
class Repeat:
    part: Node
    least: int
    most: int | None
    lazy: bool


@dataclass(frozen=True)
class Group:
    name: str
    part: Node


@dataclass(frozen=True)
class Start:
    """The beginning of all text."""


@dataclass(frozen=True)
class Never:
    """The end of all text, which never comes while text does: what is open then ends without it."""


Node = str | Char | Sequence | Either | Repeat | Group | Start | Never  # str: one character


def instance(node: Node, values: Mapping[str, str] | None = None, is_loose: bool = False) -> str:
    """A short text that this matches, with `values` for its groups. `is_loose`: with line ends where it has white space
    that may be missing."""
    values = values or {}
    match node:
        case str():
            return node
        case Char():
            return next((one for one in _SAMPLES if node.matches(one)), "")
        case Sequence():
            return "".join(instance(part, values, is_loose) for part in node.parts)
        case Either():
            texts = [instance(option, values, is_loose) for option in node.options]
            return next(filter(None, texts), "")
        case Repeat():
            return "\n" if is_loose and _is_space(node) else instance(node.part, values, is_loose) * node.least
        case Group():
            return values[node.name] if node.name in values else instance(node.part, values, is_loose)
    return ""


_SIGNS: dict[str, Node] = {".": Char("."), "^": Start(), "$": Never()}


class Parser:
    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise PatternError(f"it has {len(source)} characters; at most {MAX_SOURCE} are read")
        self._source = source
        self._at = 0
        self._depth = 0
        self.names: list[str] = []

    def parse(self) -> Node:
        node = self._options()
        if self._at < len(self._source):
            raise PatternError("a ')' closes nothing")
        return node

    def _next(self, text: str) -> bool:
        if self._source.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _options(self) -> Node:
        self._depth += 1
        if self._depth > 50:
            raise PatternError("its groups are nested too deeply")
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        found = re.compile(r"([*+?])|\{(\d*)(,?)(\d*)\}").match(self._source, self._at)
        if found is None or found[0] in ("{}", "{,}"):
            return node
        self._at = found.end()
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[1], (None, None))
        if least is None:
            least = int(found[2] or 0)
            most = (int(found[4]) if found[4] else None) if found[3] else least
            if max(least, most or 0) > MAX_COUNT:
                raise PatternError(f"it counts above {MAX_COUNT} in {found[0]!r}")
        lazy = self._next("?")
        if self._source[self._at : self._at + 1] in ("*", "+", "?") and self._at < len(self._source):
            raise PatternError(f"repetitions as in {found[0] + self._source[self._at]!r} are not supported")
        return Repeat(node, least, most, lazy)

    def _one(self) -> Node:
        if self._next("("):
            return self._group()
        if self._next("["):
            return self._class()
        if self._next("\\"):
            return self._escape()
        char = self._source[self._at]
        self._at += 1
        if char in "*+?":
            raise PatternError(f"{char!r} repeats nothing")
        return _SIGNS.get(char, char)

    def _group(self) -> Node:
        name = ""
        if self._next("?"):
            found = re.compile(r":|P<([A-Za-z_]\w{0,50})>").match(self._source, self._at)
            if found is None:
                raise PatternError(f"'(?{self._source[self._at : self._at + 2]}' is not supported")
            self._at, name = found.end(), found[1] or ""
        if name:
            self.names.append(name)
        node = self._options()
        if not self._next(")"):
            raise PatternError("a '(' is not closed")
        return Group(name, node) if name else node

    def _class(self) -> Node:
        found = re.compile(r"\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(self._source, self._at)
        if found is None:
            raise PatternError("a '[' is not closed")
        self._at = found.end()
        node = Char("[" + found[0].replace("[", r"\["))
        _ = node.matches
        return node

    def _escape(self) -> Node:
        char = self._source[self._at : self._at + 1]
        self._at += 1
        if char in _CLASSES:
            return Char("\\" + char)
        if char == "A":
            return Start()
        if char in ("Z", "z"):
            return Never()
        if char in ("x", "u"):
            digits = self._source[self._at : self._at + (2 if char == "x" else 4)]
            self._at += len(digits)
            try:
                return chr(int(digits, 16))
            except ValueError:
                raise PatternError(f"'\\{char}{digits}' is no character") from None
        if not char or (char.isalnum() and char not in _ESCAPES):
            raise PatternError(f"'\\{char}' is not supported")
        return _ESCAPES.get(char, char)


def trimmed(node: Node) -> Node:
    """Without the white space that it may end with: a match is then certain as soon as the rest of it has come, and
    who reads the text passes over white space anyway."""
    if isinstance(node, Sequence) and node.parts and _is_space(node.parts[-1]):
        return trimmed(Sequence(node.parts[:-1]))
    if isinstance(node, Either):
        return Either(tuple(map(trimmed, node.options)))
    return node


def _is_space(node: Node) -> bool:
    return (
        isinstance(node, Repeat) and node.least == 0 and (node.part in (" ", "\n") or node.part == Char(r"\s"))
    )  # fmt: skip


def beginning(node: Node) -> re.Pattern[str] | None:
    found, may_be_nothing = _first(node)
    return None if may_be_nothing else re.compile("|".join(sorted(found)) or r"(?!)", re.DOTALL)


def _first(node: Node) -> tuple[set[str], bool]:
    """(Expressions of the characters that it may begin with, whether it may match no character at all)."""
    match node:
        case str():
            return {re.escape(node)}, False
        case Char():
            return {node.source}, False
        case Never():
            return set(), False
        case Group():
            return _first(node.part)
        case Repeat():
            found, is_empty = _first(node.part)
            return found, is_empty or not node.least
        case Either():
            options = [_first(option) for option in node.options]
            return set().union(*(found for found, _ in options)), any(is_empty for _, is_empty in options)
        case Sequence():
            begun: set[str] = set()
            for part in node.parts:
                found, is_empty = _first(part)
                begun |= found
                if not is_empty:
                    return begun, False
            return begun, True
    return set(), True


def may_be_empty(node: Node, at_start: bool) -> bool:
    match node:
        case Sequence():
            return all(may_be_empty(part, at_start) for part in node.parts)
        case Either():
            return any(may_be_empty(option, at_start) for option in node.options)
        case Repeat():
            return not node.least or may_be_empty(node.part, at_start)
        case Group():
            return may_be_empty(node.part, at_start)
        case Start():
            return at_start
    return False


def literals(node: Node) -> list[str]:
    """The texts that it is made of, as they stand."""
    match node:
        case str():
            return [node]
        case Sequence():
            found, begun = [], ""
            for part in node.parts:
                if isinstance(part, str):
                    begun += part
                    continue
                found += [begun, *literals(part)]
                begun = ""
            return [text for text in (*found, begun) if text]
        case Either():
            return [text for option in node.options for text in literals(option)]
        case Repeat() | Group():
            return literals(node.part)
        case Char() | Start() | Never():
            return []
    return []
