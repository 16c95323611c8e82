"""Text of users that spells a special token: it stays text, or whoever writes to a model could speak as another.

A spelling gets a mark after its first character before the template sees it; the rendered text is tokenised piece by
piece, from mark to mark. What a template makes of two harmless texts, or a tokenizer's normaliser of other characters,
is not seen here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
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
                return [mark(one) for one in value]
            if isinstance(value, dict):
                return {name: one if name == "role" else mark(one) for name, one in value.items()}
            return value

        said = [mark(message) if message.get("role") in ROLES else message for message in messages]
        shown = mark(documents) if documents else documents
        return (said, shown) if found else None

    def _mark(self, text: str) -> str:
        if MARK in text:
            text = text.replace(MARK, "")
        for beginning, tokens in self._tokens.items():
            if beginning in text:
                for token in tokens:
                    if token in text:
                        text = text.replace(token, f"{token[0]}{MARK}{token[1:]}")
        return text


def restored(text: str) -> str:
    """With the marks that a template has escaped."""
    return text.replace(_ESCAPED, MARK) if _ESCAPED in text else text


def pieces(text: str) -> list[str]:
    """What is to be tokenised piece by piece, so that no special token is found where a mark is."""
    return text.split(MARK)


def unmarked(text: str) -> str:
    return text.replace(MARK, "")
