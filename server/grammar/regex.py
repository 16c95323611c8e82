"""Regular expressions of clients, written so that llguidance (Rust's syntax) matches nothing that Python would not."""

from __future__ import annotations

import re
import warnings

# A class stands for the characters that ECMA 262, Python and Rust agree on: a narrower grammar is still a right one.
# Inside a negated class the widest reading is the narrowest result.
_NARROW = {
    "d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\x0b",
    "D": r"\D", "W": r"[^\w\p{N}\p{M}]", "S": r"[^\s\x1c-\x1f\x{feff}]",
}  # fmt: skip
_WIDE = {
    "d": r"\d", "w": r"\w\p{N}\p{M}", "s": r"\s\x1c-\x1f\x{feff}",
    "D": r"\x00-/:-\x{10ffff}", "W": r"\x00-/:-@\[-\^`\{-\x{10ffff}", "S": r"\S",
}  # fmt: skip
_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")
_GROUP = re.compile(r"\(\?(:|P<\w+>)")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|0(?![0-7])|.)", re.DOTALL)


class RegexError(ValueError):
    """One short clause: what is wrong with the expression."""


def translate(pattern: str) -> str:
    """The same in Rust's syntax. Raises RegexError for what is no regular expression, or needs more than a grammar."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that a later Python may read differently: they are escaped below
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise RegexError(f"it is not a regular expression ({error})") from None
    result: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            piece, at = _escape(pattern, at)
            result.append(f"[{_NARROW[piece[1:]]}]" if piece[1:] in _NARROW else piece)
        elif char == "[":
            piece, at = _set(pattern, at)
            result.append(piece)
        elif char == "(" and pattern.startswith("(?", at):
            group = _GROUP.match(pattern, at)
            if group is None:
                raise RegexError(f"'{pattern[at : at + 4]}' is not supported: groups are (…), (?:…) and (?P<name>…)")
            result.append(group[0])
            at = group.end()
        elif (quantifier := _QUANTIFIER.match(pattern, at)) and quantifier[0] not in ("{}", "{,}"):
            at = quantifier.end()
            if pattern.startswith("+", at):
                raise RegexError(f"the possessive '{quantifier[0]}+' is not supported")
            result.append(quantifier[0].replace("{,", "{0,"))
            if pattern.startswith("?", at):  # laziness changes what is captured, not what matches
                at += 1
        else:
            result.append("\\" + char if char in "{}]" else char)
            at += 1
    return "".join(result)


def _escape(pattern: str, at: int) -> tuple[str, int]:
    """The escape sequence at `at` in Rust's syntax; a class (\\d and the like) as it is."""
    match = _ESCAPE.match(pattern, at)
    assert match is not None, "Python has compiled it"
    body = match[1]
    if body[0] in "xuU" and len(body) > 1:
        return f"\\x{{{body[1:]}}}", match.end()
    if body == "0":
        return r"\x00", match.end()
    if body in "dwsDWSfnrt":
        return "\\" + body, match.end()
    if body == "v":
        return r"\x0b", match.end()
    if body == "a":
        return r"\x07", match.end()
    if body.isdigit():
        raise RegexError(f"the back-reference \\{body} is not supported")
    if body.isalpha():
        raise RegexError(f"\\{body} is not supported")
    return ("\\" + body if body in r"\.^$*+?()[]{}|-&~#" else body), match.end()


def _set(pattern: str, at: int) -> tuple[str, int]:
    """The character set that begins at `at`. What only Rust reads as more than itself is escaped."""
    at += 1
    negated = pattern.startswith("^", at)
    classes = _WIDE if negated else _NARROW
    at += negated
    result = ["[^" if negated else "["]
    first = True
    while first or pattern[at] != "]":
        first = False
        char = pattern[at]
        if char == "\\":
            if pattern.startswith("\\b", at):
                piece, at = r"\x08", at + 2
            else:
                piece, at = _escape(pattern, at)
            result.append(classes.get(piece[1:], piece))
        else:
            # a hyphen between two others is a range; another one stands for itself
            is_range = char == "-" and len(result) > 1 and result[-1] != "-" and pattern[at + 1] != "]"
            result.append(char if char.isalnum() or ord(char) > 127 or is_range else f"\\x{ord(char):02x}")
            at += 1
    return "".join(result) + "]", at + 1
