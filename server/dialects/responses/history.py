"""The conversation that a response goes on from: bytes of the store, messages only while a prompt is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...text import conversation
from ...wire.requests import ChatRequest
from ..pieces import NONE, Pieces

SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class History:
    pieces: Pieces = NONE
    num_before: int = 0  # messages of the chat that come before it
    stands_in: bool = False  # its last message is the chat's, which brings none of its own

    @classmethod
    def of(cls, pieces: Pieces, instructions: str | None, brings: bool) -> History:
        """`instructions`: the system message of the request; `brings`: whether it has messages beside that."""
        return cls(pieces, int(instructions is not None), not brings)

    def messages(self, chat: ChatRequest, first: int = 0, start: int = 0) -> list[dict[str, Any]]:
        """Of the whole conversation, whose chat knows what the request brings: the `first` ones and those from `start`
        on. Takes as long as there are many."""
        found: list[dict[str, Any]] = []
        for messages, offset, is_read in self._parts(chat):
            part = messages[: max(0, first - offset)] + messages[max(0, start - offset) :]
            found += part if is_read or not part else conversation.messages(part)
        return found

    def unread(self, chat: ChatRequest) -> list[dict[str, Any]]:
        """The same messages, the stored ones as they were stored."""
        return [message for messages, _, _ in self._parts(chat) for message in messages]

    def _parts(self, chat: ChatRequest) -> Iterator[tuple[list[dict[str, Any]], int, bool]]:
        """(messages, how many come before them, whether they are as templates want them)"""
        yield chat.messages[: self.num_before], 0, True
        stored = list(self.pieces.entries())
        yield stored, self.num_before, False
        if not self.stands_in:
            yield chat.messages[self.num_before :], self.num_before + len(stored), True


def newest(pieces: Pieces, num_bytes: int, num_messages: int) -> Pieces:
    """The latest turns that are within both, behind the system messages of the beginning; the same where all are. Of a
    turn that is not, the user's message and the latest of what followed; where that message alone is not, the system
    messages."""
    if pieces.num_bytes <= num_bytes and len(pieces) <= num_messages:
        return pieces
    system = []
    for message in pieces[:1].entries():
        if message["role"] not in SYSTEM:
            break
        system.append(message)
    rest = pieces.latest(num_bytes, num_messages)
    if not (turns := _from("user", rest)).texts:
        question = _last("user", pieces[: len(pieces.texts) - len(rest.texts)])
        if question.texts and question.num_bytes <= num_bytes:
            # An assistant's message comes first: a tool's answers what is left out.
            turns = question + _from("assistant", pieces.latest(num_bytes - question.num_bytes, num_messages - 1))
    return Pieces.of(system) + turns


def has_turns(pieces: Pieces) -> bool:
    """Whether `newest` kept more than system messages."""
    return any(message["role"] not in SYSTEM for message in pieces.last())


def _from(role: str, pieces: Pieces) -> Pieces:
    """From the first message on that has this role."""
    for at in range(len(pieces.texts)):
        messages = list(pieces[at : at + 1].entries())
        for i, message in enumerate(messages):
            if message["role"] == role:
                return Pieces.of(messages[i:]) + pieces[at + 1 :]
    return NONE


def _last(role: str, pieces: Pieces) -> Pieces:
    """The last message alone that has this role."""
    for at in reversed(range(len(pieces.texts))):
        for message in reversed(list(pieces[at : at + 1].entries())):
            if message["role"] == role:
                return Pieces.of([message])
    return NONE
