"""The incremental core of all parsers: text comes in pieces, parts come out as soon as they are certain.

A format is a generator that reads with the methods below and yields wherever it needs text that has not come. Where the
pieces are cut makes no difference to what comes out, taken together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from .json_text import Scan
from .parts import Content, Part, Reasoning, merged
from .patterns import MAX_WORK, Found, Pattern, Search

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields for more text, returns a T

_SPACE = re.compile(r"\s*")
_PIECE = 32  # characters that patterns are shown at a time


class Match(NamedTuple):
    """What a pattern has found, and which one of several."""

    which: int
    before: str  # what stands between the place that was read up to and this
    text: str
    groups: dict[str, str]


class TextReader:
    """Text as it comes: what is let out as reasoning or content, and what is held back until it is known."""

    def __init__(self, read: Callable[[Any], Reading[None]]) -> None:
        self.thinking = False  # what comes now is reasoning
        self.num_calls = 0
        self._text = ""  # what has come and may be needed
        self._at = 0  # what stands before this is read
        self._ended = False  # nothing more will come
        self._starved = False  # something was incomplete when the text ended
        self._marker = (0, 0)  # start and end of what may have begun a call
        self._space: list[str] = []  # white space that goes out with what follows it, if text does
        self._fresh = False  # leading white space is dropped
        self._spoken = False  # some text was no reasoning
        self._parts: list[Part] = []
        self._num_come = 0  # characters
        self._work = 0  # steps of patterns
        self._reading = read(self)
        self.feed("")  # it may be in its reasoning before anything has come

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        # A local that nothing else refers to grows in place: text that is held back is not copied for each piece.
        held, self._text = self._text, ""
        held += text
        self._num_come += len(text)
        self._text = held
        del held
        try:
            next(self._reading)
        except StopIteration:  # the format is through: all that follows is text
            self._say(self._text[self._at :])
            self._say_space()
            self._text, self._at = "", 0
        parts, self._parts = self._parts, []
        return merged(parts)

    def finish(self) -> list[Part]:
        """What is left when nothing more comes."""
        self._ended = True
        while True:  # what is no call may be read once more, as text
            try:
                next(self._reading)
            except StopIteration:
                break
        self._say(self._text[self._at :])
        self._say_space()
        self._text, self._at = "", 0
        parts, self._parts = self._parts, []
        return merged(parts)

    def _say(self, text: str) -> None:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        said = text.rstrip()
        if not said:
            if text:
                self._space.append(text)
            return
        whole = "".join((*self._space, said)) if self._space else said
        self._space = [text[len(said) :]] if len(said) < len(text) else []
        self._parts.append(Reasoning(whole) if self.thinking else Content(whole))
        self._spoken |= not self.thinking

    def _say_space(self) -> None:
        """White space at the end, where no call can follow that it would belong to."""
        if self._space and not self.thinking and not self.num_calls and not self._fresh:
            self._parts.append(Content("".join(self._space)))
            self._space = []

    @property
    def held_space(self) -> str:
        """White space of the text that waits for what follows it, which may be a call."""
        return "" if self.thinking or self.num_calls else self.space

    @property
    def space(self) -> str:
        """White space that waits for what follows it."""
        return "".join(self._space)

    def turn(self, thinking: bool, space: str = "", strips: bool = True) -> None:
        """From text to reasoning, or back. White space around either is dropped, behind this only if it `strips`;
        `space` comes before what follows."""
        self.thinking, self._space, self._fresh = thinking, [space] if space else [], strips

    @property
    def left(self) -> str:
        """What has come and is not read."""
        return self._text[self._at :]

    def read_rest(self) -> str:
        """All that is left."""
        rest, self._at = self.left, len(self._text)
        return rest

    def text_until(self, *markers: str) -> Reading[str]:
        """Lets text out up to one of these and reads that; returns it, "" at the end."""
        while True:
            text = self._text
            found = [(start, marker) for marker in markers if (start := text.find(marker, self._at)) >= 0]
            if found:
                start, marker = min(found)
                self._say(text[self._at : start])
                self._marker = start, start + len(marker)
                self._at = start + len(marker)
                self._forget(start)
                return marker
            cut = len(text) if self._ended else len(text) - self._begun(markers)
            self._say(text[self._at : cut])
            self._text, self._at, self._marker = text[cut:], 0, (0, 0)
            if self._ended:
                return ""
            yield

    def _begun(self, markers: tuple[str, ...]) -> int:
        """How many of the last characters may be the beginning of a marker."""
        text, longest = self._text, 0
        for marker in markers:
            start = text.find(marker[0], max(self._at, len(text) - len(marker) + 1))
            while start >= 0:
                if marker.startswith(text[start:]):
                    longest = max(longest, len(text) - start)
                    break
                start = text.find(marker[0], start + 1)
        return longest

    def skip(self, *literals: str) -> Reading[str]:
        """Reads one of these and the white space before it, where they are next; returns it, "" otherwise."""
        at = self._at
        while True:
            at = self._past_space(at)
            for literal in literals:
                if self._text.startswith(literal, at):
                    self._at = at + len(literal)
                    return literal
            rest = self._text[at : at + max(map(len, literals))]
            possible = any(literal.startswith(rest) for literal in literals)
            if self._ended or not possible:
                self._starved |= possible
                return ""
            yield

    def word_until(self, *stops: str) -> Reading[tuple[str, str] | None]:
        """Reads up to one of these; (what stands before it, which it is). None at the end, or after 200 characters."""
        while True:
            found = [(start, stop) for stop in stops if (start := self._text.find(stop, self._at)) >= 0]
            start, stop = min(found, default=(len(self._text), ""))
            if start - self._at > 200:
                return None
            if stop:
                word, self._at = self._text[self._at : start], start + len(stop)
                return word, stop
            if self._ended:
                self._starved = True
                return None
            yield

    def unread(self, text: str) -> None:
        """Goes back before `text`, which was read last."""
        self._at -= len(text)

    def up_to(self, stop: str) -> Reading[str | None]:
        """Reads up to this, however long that is; what stands before it, or None where it never comes."""
        if not (yield from self.comes(stop)):
            self._starved = True
            return None
        start, self._at = self._at, self._text.find(stop, self._at) + len(stop)
        return self._text[start : self._at - len(stop)]

    def up_to_match(
        self, pattern: re.Pattern[str], longest: int, accepts: Callable[[re.Match[str], bool], bool]
    ) -> Reading[tuple[str, re.Match[str]] | None]:
        """Reads up to what this pattern first finds and `accepts`, given the match and whether all text has come; (what
        stands before it, the match). None where it never comes. `longest`: characters that a match may have, with what
        it looks ahead to."""
        at = self._at
        while (found := self._found(pattern, at, accepts)) is None:
            if self._ended:
                self._starved = True
                return None
            at = max(at, len(self._text) - longest)
            yield
        start, self._at = self._at, found.start()
        return self._text[start : self._at], found

    def _found(
        self, pattern: re.Pattern[str], at: int, accepts: Callable[[re.Match[str], bool], bool]
    ) -> re.Match[str] | None:
        return next((found for found in pattern.finditer(self._text, at) if accepts(found, self._ended)), None)

    def comes(self, *markers: str) -> Reading[bool]:
        """Waits until one of these has come, or nothing more will. Nothing is read."""
        at, longest = self._at, max(map(len, markers))
        while all(self._text.find(marker, at) < 0 for marker in markers):
            if self._ended:
                return False
            at = max(at, len(self._text) - longest + 1)
            yield
        return True

    def matched(
        self, patterns: Sequence[Pattern], text: Literal["said", "dropped", "kept"], most: int | None = None
    ) -> Reading[Match | None]:
        """Reads up to what is found first of these, and that. None at the end, or where `most` characters have none.

        `text`: what is done with that before it. Where it is kept, what has not been found has not been read.
        """
        searches = [Search(pattern) for pattern in patterns]
        origin = shown = self._at
        worked = 0
        while True:
            found = None
            while found is None and shown < len(self._text) and not self._is_exhausted:
                piece = self._text[shown : shown + _PIECE]
                for search in searches:
                    search.feed(piece)
                shown += len(piece)
                self._work += (work := sum(search.work for search in searches)) - worked
                worked = work
                found = _earliest(searches)
            if found is None and (self._ended or self._is_exhausted):
                for search in searches:
                    search.end()
                found = _earliest(searches)
            if found is not None:
                return self._take(*found, origin, text)
            if text != "kept":
                held = min((search.held for search in searches), default=len(self._text) - origin)
                cut = len(self._text) if self._ended else origin + held
                if text == "said":
                    self._say(self._text[self._at : cut])
                self._text, self._at, self._marker = self._text[cut:], 0, (0, 0)
                origin, shown = origin - cut, shown - cut
            if self._ended or self._is_exhausted:
                self._starved |= text == "kept"
                return None
            if most is not None and len(self._text) - self._at > most:
                return None
            yield

    @property
    def _is_exhausted(self) -> bool:
        return self._work > MAX_WORK * (self._num_come + _PIECE)

    def _take(self, index: int, found: Found, origin: int, text: Literal["said", "dropped", "kept"]) -> Match:
        start, end = origin + found.start, origin + found.end
        groups = {name: self._text[origin + a : origin + b] for name, (a, b) in found.groups.items()}
        match = Match(index, self._text[self._at : start], self._text[start:end], groups)
        self._at = end
        if text == "said":
            self._say(match.before)
        if text != "kept":
            self._marker = start, end
            self._forget(start)
        return match

    def bracketed(self) -> Reading[str | None]:
        """Reads up to the bracket that closes what is open, as Python writes it; what stands before it, or None."""
        start, quote, depth, escaped = self._at, "", 1, False
        while True:
            while self._at < len(self._text):
                char = self._text[self._at]
                self._at += 1
                if quote:
                    if escaped:
                        escaped = False
                    elif char == "\\":
                        escaped = True
                    elif char == quote:
                        quote = ""
                elif char in "\"'":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif char in ")]}":
                    depth -= 1
                    if not depth:
                        return self._text[start : self._at - 1]
            if self._ended:
                self._starved = True
                return None
            yield

    def mark(self) -> None:
        """What follows may be a call: `reject` goes back to here."""
        self._marker = self._at, self._at
        self._forget(self._at)

    def reject(self) -> None:
        """What began at the last marker, or after the last call, is none: it is text from there on."""
        start, end = self._marker
        self._at = len(self._text) if self._starved else end
        self._say(self._text[start : self._at])
        self._marker = self._at, self._at

    def peek(self) -> Reading[str]:
        """The next character that is no white space, which is not read; "" at the end."""
        at = self._at
        while (at := self._past_space(at)) == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[at]

    def _past_space(self, at: int) -> int:
        return _SPACE.match(self._text, at).end()  # type: ignore[union-attr]

    def _forget(self, before: int) -> None:
        """Drops what stands before this place; not each time, which would copy a long text for each call in it."""
        if before > len(self._text) // 2:
            self._text = self._text[before:]
            self._at -= before
            self._marker = self._marker[0] - before, self._marker[1] - before

    def value(self, pass_on: Callable[[str], None] | None = None) -> Reading[str | None]:
        """Reads a JSON value; its text, or None where none is or it breaks off. Only `as_object` says if it is valid.

        `pass_on` gets the text as it comes, and what is returned is then not the whole.
        """
        yield from self.peek()
        start = sent = self._at = self._past_space(self._at)
        scan = Scan()
        while True:
            done = None
            while done is None and self._at < len(self._text):
                done = scan.ends_with(self._text[self._at])
                self._at += done is not False
            if done and scan.bare:
                self._at -= 1  # a number ends where something else stands
            if pass_on is not None:
                pass_on(self._text[sent : self._at])
                self.mark()  # it is out: nothing goes back before it
                start = sent = self._at
            if done is not None:
                return self._text[start : self._at] if done else None
            if self._ended:
                self._starved = True
                return None
            yield


def _earliest(searches: Sequence[Search]) -> tuple[int, Found] | None:
    """(which, what) was found first, the longest where several begin there; None: that is not yet known."""
    found = [(i, one) for i, search in enumerate(searches) if (one := search.found) is not None]
    if not found:
        return None
    index, first = min(found, key=lambda one: (one[1].start, -one[1].end))
    pending = (search.held for search in searches if search.found is None)
    return (index, first) if all(first.start < held for held in pending) else None
