"""What an answer is made of, as it comes. Endpoints turn these into whatever their clients expect."""

from __future__ import annotations

from dataclasses import dataclass


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


def append(parts: list[Part], new: Part) -> None:
    """Text that continues the last part becomes one with it."""
    last = parts[-1] if parts else None
    if isinstance(last, Content) and isinstance(new, Content):
        parts[-1] = Content(last.text + new.text)
    elif isinstance(last, Reasoning) and isinstance(new, Reasoning):
        parts[-1] = Reasoning(last.text + new.text)
    elif isinstance(last, CallArguments) and isinstance(new, CallArguments) and last.index == new.index:
        parts[-1] = CallArguments(last.index, last.text + new.text)
    else:
        parts.append(new)


def written(parts: list[Part]) -> str:
    """All of them as one text, for logs."""
    return "".join(f" {part.name}" if isinstance(part, CallBegin) else part.text for part in parts)
