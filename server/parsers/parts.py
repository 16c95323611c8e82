"""What an answer is made of, as it comes. Endpoints turn these into whatever their clients expect."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool is called. A call's arguments follow before the next call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


def merged(parts: list[Part]) -> list[Part]:
    """Text that continues the part before it becomes one with it, all of it at once: piece by piece, an answer of n
    pieces would be copied n times."""
    if len(parts) < 2:
        return parts
    if len(parts) == 2 and isinstance(first := parts[0], Content) and isinstance(second := parts[1], Content):
        return [Content(first.text + second.text)]  # a word and its space: most of what is no single part
    found: list[Part] = []
    pieces: list[str] = []  # of the last one found, beside its own
    for part in parts:
        last = found[-1] if found else None
        if last is not None and _continues(part, last):
            assert not isinstance(part, CallBegin)
            pieces.append(part.text)
        else:
            _complete(found, pieces)
            found.append(part)
            pieces = []
    _complete(found, pieces)
    return found


def _continues(part: Part, last: Part) -> bool:
    if isinstance(part, CallArguments):
        return isinstance(last, CallArguments) and last.index == part.index
    return type(part) is type(last) and not isinstance(part, CallBegin)


def _complete(found: list[Part], pieces: list[str]) -> None:
    if pieces:
        last = found[-1]
        assert not isinstance(last, CallBegin)
        found[-1] = replace(last, text="".join((last.text, *pieces)))


def written(parts: list[Part]) -> str:
    """All of them as one text, for logs."""
    return "".join(f" {part.name}" if isinstance(part, CallBegin) else part.text for part in parts)
