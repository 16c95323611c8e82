"""Regular expressions that come with a model, matched in time that grows as the text does, whatever they say: all that
may match is followed at once, character by character, and nothing is tried again. Text may come in pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

from .pattern_nodes import (
    Char,
    Either,
    Group,
    Never,
    Node,
    Parser,
    PatternError,
    Repeat,
    Sequence,
    Start,
    beginning,
    trimmed,
)

MAX_STEPS = 256  # of a program; each character takes at most as many
MAX_WORK = 200  # steps for each character of a text, in all searches through it: beyond, nothing more is looked for
_CHAR, _SPLIT, _SAVE, _MATCH, _FAIL = range(5)
Step = tuple[int, Any, Any]


class Pattern:
    """A pattern, or some texts of which any is found, the longest first. Raises PatternError."""

    def __init__(self, source: str | tuple[str, ...]) -> None:
        self.names: list[str] = []
        if isinstance(source, str):
            parser = Parser(source)
            self.node, self.names = parser.parse(), parser.names
        else:
            texts = sorted(source, key=len, reverse=True)
            self.node = Either(tuple(Sequence(tuple(text)) for text in texts))
        if len(set(self.names)) < len(self.names):
            raise PatternError("two of its groups have the same name")
        self.steps: list[Step] = []
        self._write(trimmed(self.node))
        self.steps.append((_MATCH, None, None))
        self.begins = beginning(self.node)  # what finds where it may begin; None: anywhere

    def _write(self, node: Node) -> None:
        steps = self.steps
        if len(steps) > MAX_STEPS:
            raise PatternError(f"it takes more than {MAX_STEPS} steps")
        match node:
            case str():
                steps.append((_CHAR, node.__eq__, None))
            case Char():
                known: dict[str, bool] = {}
                matches = node.matches

                def test(char: str) -> bool:
                    if char not in known:
                        known[char] = matches(char) is not None
                    return known[char]

                steps.append((_CHAR, test, None))
            case Sequence():
                for part in node.parts:
                    self._write(part)
            case Either():
                ends = []
                for option in node.options[:-1]:
                    at = len(steps)
                    steps.append((_FAIL, None, None))
                    self._write(option)
                    ends.append(len(steps))
                    steps.append((_FAIL, None, None))
                    steps[at] = (_SPLIT, at + 1, len(steps))
                self._write(node.options[-1])
                for end in ends:
                    steps[end] = (_SPLIT, len(steps), None)
            case Repeat():
                self._write_repeat(node)
            case Group():
                steps.append((_SAVE, node.name, 0))
                self._write(node.part)
                steps.append((_SAVE, node.name, 1))
            case Start() | Never():  # who reads an answer knows by itself what may begin it
                steps.append((_FAIL, None, None))

    def _write_repeat(self, node: Repeat) -> None:
        steps = self.steps
        for _ in range(node.least):
            before = len(steps)
            self._write(node.part)
            if len(steps) == before:  # it writes nothing, however often
                break
        if node.most is None:
            at = len(steps)
            steps.append((_FAIL, None, None))
            self._write(node.part)
            steps.append((_SPLIT, at, None))
            steps[at] = (_SPLIT, *self._ordered(at + 1, len(steps), node.lazy))
            return
        begun = []
        for _ in range(node.most - node.least):
            begun.append(len(steps))
            steps.append((_FAIL, None, None))
            self._write(node.part)
        for at in begun:
            steps[at] = (_SPLIT, *self._ordered(at + 1, len(steps), node.lazy))

    @staticmethod
    def _ordered(again: int, on: int, lazy: bool) -> tuple[int, int]:
        return (on, again) if lazy else (again, on)


class Found(NamedTuple):
    """Places count from where the search began."""

    start: int
    end: int
    groups: dict[str, tuple[int, int]]


Thread = tuple[int, int, dict[str, tuple[int, int]]]  # step, start, groups


class Search:
    """Looks for the first match of a pattern, as Perl and Python have it, in text that comes in pieces."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._threads: list[Thread] = []  # the first comes before the others
        self._best: Found | None = None
        self.at = 0  # how many characters have come
        self.work = 0  # steps that were taken

    @property
    def found(self) -> Found | None:
        """What nothing that follows can change."""
        return self._best if not self._threads else None

    @property
    def held(self) -> int:
        """What stands before this is in no match."""
        starts = [start for _, start, _ in self._threads]
        return min([*starts, self.at] if self._best is None else [*starts, self._best.start])

    def end(self) -> None:
        """Nothing more comes."""
        self._threads = []

    def feed(self, text: str) -> None:
        i, begins = 0, self._pattern.begins
        while i < len(text) and (self._best is None or self._threads):
            if not self._threads and begins is not None:
                found = begins.search(text, i)
                skipped = (len(text) if found is None else found.start()) - i
                self.at, i = self.at + skipped, i + skipped
                if found is None:
                    return
            self._step(text[i])
            i += 1

    def _step(self, char: str) -> None:
        threads, steps = self._threads, self._pattern.steps
        if self._best is None:
            self._begin(threads, {step for step, _, _ in threads})
            if self._best is not None and not threads:
                return
        self.at += 1
        self.work += 1 + len(threads)
        self._threads = []
        seen: set[int] = set()
        for step, start, groups in threads:
            if steps[step][1](char) and self._add(self._threads, seen, step + 1, start, groups):
                break

    def _begin(self, threads: list[Thread], seen: set[int]) -> None:
        self._add(threads, seen, 0, self.at, {})

    def _add(
        self, threads: list[Thread], seen: set[int], step: int, start: int, groups: dict[str, tuple[int, int]]
    ) -> bool:
        """Follows all steps that take no character. True: it is a match, which what comes later cannot replace."""
        todo = [(step, groups)]
        while todo:
            step, groups = todo.pop()
            if step in seen:
                continue
            seen.add(step)
            kind, one, other = self._pattern.steps[step]
            if kind == _CHAR:
                threads.append((step, start, groups))
            elif kind == _MATCH:
                self._best = Found(start, self.at, groups)
                return True
            elif kind == _SPLIT:
                if other is not None:
                    todo.append((other, groups))
                todo.append((one, groups))
            elif kind == _SAVE:
                begun = groups.get(one, (self.at, self.at))[0] if other else self.at
                todo.append((step + 1, {**groups, one: (begun, self.at)}))
        return False


def find_all(pattern: Pattern, text: str) -> list[Found] | None:
    """All matches, none within another. None: finding them takes too long."""
    found: list[Found] = []
    at, work = 0, 0
    while at < len(text):
        search = Search(pattern)
        for piece in range(at, len(text), 64):
            search.feed(text[piece : piece + 64])
            if search.found is not None:
                break
            if work + search.work > MAX_WORK * (len(text) + 64):
                return None
        work += search.work
        search.end()
        if (one := search.found) is None or one.end == 0:
            break
        found.append(Found(one.start + at, one.end + at, {k: (a + at, b + at) for k, (a, b) in one.groups.items()}))
        at += one.end
    return found
