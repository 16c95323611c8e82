"""Calls of tools, as a format reads them from an answer's text."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from .json_text import as_object, as_string
from .parts import CallArguments, CallBegin
from .text_reader import Reading, TextReader

_NAMES = ("name", "tool_name")
_KEYS = (*_NAMES, "arguments", "parameters", "type", "id", "tool_call_id")  # of a call


def new_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


class Reader(TextReader):
    def __init__(
        self,
        read: Callable[[Reader], Reading[None]],
        tools: Mapping[str, str] | None = None,
        *,
        streams: bool = False,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        """`tools`: those that may be called, and the JSON schemas of their arguments; what calls another one is text.
        `streams`: arguments go out as they come, which needs a grammar that keeps them valid. Otherwise a call goes out
        once it is complete and valid, and as text where it never is.
        """
        self.tools = tools or {}
        self.ids: set[str] = set()  # of the calls so far
        self.next_id: str | None = None  # of the next call, where the model gives it one
        self._streams = streams
        self._new_id = new_id
        super().__init__(read)

    def would_call(self, read: Callable[[Reader], Reading[None]]) -> bool:
        """Whether there is a whole call in what has come, as this format has it."""
        trial = Reader(read, self.tools)
        trial.feed(self._text[self._at :])
        trial.finish()
        return trial.num_calls > 0

    def call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self._begin(name)
        self._more(arguments)
        self.mark()

    def _begin(self, name: str) -> None:
        self._space, self._fresh = [], not self._spoken
        id, self.next_id = self.next_id or self._new_id(), None
        self._parts.append(CallBegin(self.num_calls, id, name))
        self.ids.add(id)
        self.num_calls += 1

    def _more(self, arguments: str) -> None:
        if arguments:
            self._parts.append(CallArguments(self.num_calls - 1, arguments))

    def knows(self, name: object) -> bool:
        return isinstance(name, str) and name in self.tools

    def json_call(self, *, needs_arguments: bool = False) -> Reading[bool]:
        """Reads a call written as a JSON object: {"name": …, "arguments" or "parameters": {…}}, in any order.

        False: there is none, and nothing was read. `needs_arguments`: without them it is none, nor with keys that calls
        do not have: it may be some other JSON.
        """
        start, before = self._at, self.num_calls
        if (yield from self._members(needs_arguments)):
            self.mark()
            return True
        if self.num_calls > before:  # it broke off when part of it was out
            self.mark()
            return True
        self._at = start
        return False

    def _members(self, needs_arguments: bool) -> Reading[bool]:
        if not (yield from self.skip("{")):
            return False
        name: str | None = None
        arguments: str | None = None if needs_arguments else "{}"
        begun = False
        while True:
            key = as_string((yield from self.value()))
            if key is None or (needs_arguments and key not in _KEYS) or not (yield from self.skip(":")):
                return False
            if key in _NAMES:
                given = as_string((yield from self.value()))
                if not self.knows(given):
                    return False
                name = given if name is None else name
            elif key in ("arguments", "parameters"):
                if name is not None and not begun and self._streams:
                    begun = yield from self._pass_on(name)
                    if not begun:
                        return False
                else:
                    arguments = as_object((yield from self.value()))
                    if arguments is None:
                        return False
            elif (yield from self.value()) is None:
                return False
            following = yield from self.skip(",", "}")
            if following != ",":
                break
        if not following or name is None or (arguments is None and not begun):
            return False
        if not begun:
            self.call(name, arguments or "{}")
        return True

    def arguments(self, name: str) -> Reading[bool]:
        """Reads the arguments of a call of this tool, a JSON object. False: there is none."""
        if self._streams:
            return (yield from self._pass_on(name))
        arguments = as_object((yield from self.value()))
        if arguments is None:
            return False
        self.call(name, arguments)
        return True

    def _pass_on(self, name: str) -> Reading[bool]:
        """Lets arguments out as they come. False: nothing went out, they are no object."""
        if (yield from self.peek()) != "{":
            arguments = as_object((yield from self.value()))
            if arguments is not None:
                self.call(name, arguments)
            return arguments is not None
        self._begin(name)
        yield from self.value(self._more)
        return True
