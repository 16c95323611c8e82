"""Words of a command line as argparse reads them: JSON that is given key by key becomes one object, and a switch may
have a value."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..options.parts import put
from ..options.reading import switch

_TAKES_PARTS = "takes_parts"

Actions = Mapping[str, argparse.Action]  # by flag


def take_parts(action: argparse.Action) -> None:
    """Its value is a JSON object, which may also be given key by key."""
    setattr(action, _TAKES_PARTS, True)


def rewritten(actions: Actions, words: list[str]) -> list[str]:
    """Raises ValueError with what is wrong."""
    at = words.index("--") if "--" in words else len(words)
    done: list[str] = []
    trees: dict[str, dict[str, Any]] = {}
    left = Lookahead(words[:at])
    for word in left:
        name, equals, value = word.partition("=")
        action = actions.get(name)
        if isinstance(action, argparse.BooleanOptionalAction):
            done.append(_switched(action, name, value if equals else left.take("true", "false")))
        elif (option := _whole(actions, name)) is not None:
            if not equals and (value := left.take() or "--").startswith("--"):
                raise ValueError(f"argument {name}: a value is missing")
            try:
                put(trees.setdefault(option, {}), name.partition(".")[2], value)
            except ValueError as error:
                raise ValueError(f"argument {name}: {error}") from None
        else:
            done.append(word)
    for option in trees:
        if any(word.partition("=")[0] in actions[option].option_strings for word in done):
            raise ValueError(f"{option} is given whole, and in parts: leave one out")
    return [*done, *(f"{option}={json.dumps(tree)}" for option, tree in trees.items()), *words[at:]]


class Lookahead(Iterator[str]):
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._next = 0

    def __next__(self) -> str:
        if self._next == len(self._words):
            raise StopIteration
        self._next += 1
        return self._words[self._next - 1]

    def take(self, *allowed: str) -> str | None:
        """The next word, if there is one and (in whatever case) it is allowed; it is then not iterated over."""
        if self._next == len(self._words) or (allowed and self._words[self._next].lower() not in allowed):
            return None
        return next(self)


def _switched(action: argparse.Action, name: str, value: str | None) -> str:
    """`--switch False` as `--no-switch`: vLLM gives some switches a value, which must not become the model."""
    if value is None:
        return name
    try:
        on = switch(value) != name.startswith("--no-")
    except ValueError as error:
        raise ValueError(f"argument {name}: {error}") from None
    return next(flag for flag in action.option_strings if flag.startswith("--") and flag.startswith("--no-") != on)


def _whole(actions: Actions, name: str) -> str | None:
    """`--option` of `--option.key`."""
    option, dot, _ = name.partition(".")
    action = actions.get(option)
    return action.option_strings[0] if dot and getattr(action, _TAKES_PARTS, False) and action is not None else None
