"""Text of users that spells a special token: it stays text, or whoever writes to a model could speak as another.

A spelling gets a mark after its first character before the template sees it; the rendered text is tokenised piece by
piece, from mark to mark. Parts of one content may be printed with nothing between them: one that goes on with a token
that another began gets a mark before it. What a template makes of other harmless texts, or a tokenizer's normaliser of
other characters, is not seen here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

MARK = "\ufdd0"  # Unicode promises that it is no character: a user's own are left out of a chat
_ESCAPED = MARK.encode("ascii", "backslashreplace").decode()
ROLES = ("user", "tool", "function", "query", "document")  # whose words come from elsewhere
BEGINNING = 8  # characters of special tokens that are looked for first


class Spellings:
    """Of the special tokens of one tokenizer."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # By their beginnings, of which nearly no text has one: it is looked through a few times, and not once a token,
        # of which some models have a thousand. One regular expression of all would hold the interpreter for minutes
        # where a long text is nothing but beginnings.
        self._tokens: defaultdict[str, list[str]] = defaultdict(list)
        for token in sorted((token for token in tokens if len(token) > 1), key=len, reverse=True):
            self._tokens[token[:BEGINNING]].append(token)

    def marked(self, messages: list[dict[str, Any]], documents: Any = None) -> tuple[list[dict[str, Any]], Any] | None:
        """The same messages and documents, with a mark within each special token that a user, a tool or a document has
        spelled; None where there is none."""
        found = False

        def mark(value: Any) -> Any:
            nonlocal found
            if isinstance(value, str):
                text = self._mark(value)
                found = found or text is not value
                return text
            if isinstance(value, list):
                parts = [mark(one) for one in value]
                for i in self._goes_on([_text(part) for part in parts]):
                    parts[i] = _marked_before(parts[i])
                    found = True
                return parts
            if isinstance(value, dict):
                return {name: one if name == "role" else mark(one) for name, one in value.items()}
            return value

        said = [mark(message) if message.get("role") in ROLES else message for message in messages]
        shown = mark(documents) if documents else documents
        return (said, shown) if found else None

    def _mark(self, text: str) -> str:
        if MARK in text:
            text = text.replace(MARK, "")
        for token in self._begun(text):
            if token in text:
                text = text.replace(token, f"{token[0]}{MARK}{token[1:]}")
        return text

    def _begun(self, text: str) -> Iterator[str]:
        """The tokens whose beginnings are in a text."""
        return (token for beginning, tokens in self._tokens.items() if beginning in text for token in tokens)

    def _goes_on(self, texts: list[str]) -> set[int]:
        """Which of these texts, one after another, go on with a token that began before them: as they are, or trimmed,
        as some templates print parts. No token is within one of them."""
        found: set[int] = set()
        if len(texts) < 2:
            return found
        for shown in (texts, [text.strip() for text in texts]):
            whole, starts = "".join(shown), list(accumulate(map(len, shown), initial=0))
            for token in self._begun(whole):
                at = whole.find(token)
                while at >= 0:
                    found.update(range(bisect_right(starts, at), bisect_left(starts, at + len(token))))
                    at = whole.find(token, at + 1)
        return found


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _marked_before(part: Any) -> Any:
    if isinstance(part, dict):
        return {**part, "text": MARK + _text(part)}
    return MARK + part if isinstance(part, str) else part


def restored(text: str) -> str:
    """With the marks that a template has escaped."""
    return text.replace(_ESCAPED, MARK) if _ESCAPED in text else text


def pieces(text: str) -> list[str]:
    """What is to be tokenised piece by piece, so that no special token is found where a mark is."""
    return text.split(MARK)


def unmarked(text: str) -> str:
    return text.replace(MARK, "")
