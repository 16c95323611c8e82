"""What one choice said, all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from ...engine.link.plan import TokenLogprobs
from ..parsers.parts import Part, merged
from .choice import Choice, Delta


@dataclass
class Answer:
    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)  # where reasoning and tool calls are told from the text

    @property
    def delta(self) -> Delta:
        parts, finish = self.parts or None, self.choice.finish_reason
        return Delta(self.text, self.token_ids, self.logprobs, self.offsets, finish, parts)


class Collected:
    """The answers of some choices, as their deltas come."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        """`choices`: more may be appended later."""
        self._choices = choices
        self._answers: list[Answer] = []
        self._texts: list[list[str]] = []

    def add(self, choice: Choice, delta: Delta) -> None:
        for other in self._choices[len(self._answers) : choice.index + 1]:
            self._answers.append(Answer(other))
            self._texts.append([])
        answer = self._answers[choice.index]
        self._texts[choice.index].append(delta.text)
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs or ()
        answer.offsets += delta.offsets or ()
        answer.parts += delta.parts or ()

    def answers(self) -> list[Answer]:
        """When all of them are whole."""
        for answer, pieces in zip(self._answers, self._texts, strict=True):
            answer.text = "".join(pieces)
            answer.parts = merged(answer.parts)
        return self._answers


async def collect(choices: Sequence[Choice], deltas: AsyncIterator[tuple[Choice, Delta]]) -> list[Answer]:
    """The answer of each choice, when all of them are whole."""
    collected = Collected(choices)
    async for choice, delta in deltas:
        collected.add(choice, delta)
    return collected.answers()
