"""What a chat template can take. Most take less than clients send, and lose the rest without a word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal


def _can(default: Any, **lines: str) -> Any:
    """A field. `lines`: what is said of a value that is not the default."""
    return field(default=default, metadata={"lines": lines})


@dataclass(frozen=True)
class Capabilities:
    """Of one template. The defaults: it takes everything as clients send it."""

    takes_text: bool = _can(True, no="content goes as a list of parts, for text is lost or refused")
    parts: frozenset[str] = frozenset()  # roles whose content may be several parts; of others they are joined
    knows_system: bool = _can(True, no="it knows no system message: it goes before the first user's")
    knows_developer: bool = _can(True, no="it knows no developer: such messages go as system messages")
    many_systems: bool = _can(True, no="it takes one system message: those at the beginning are joined")
    developer_beside_system: bool = _can(True, no="it takes a developer's message or a system message: both are joined")
    later_system: bool = _can(True, no="a system message after the first turn is lost or refused: it goes as a user's")
    later_developer: bool = _can(True, no="a developer's message after the first turn goes as a system message")
    user_turns: bool = _can(True, no="it takes one user's message a turn: those in a row are joined")
    assistant_turns: bool = _can(True, no="it takes one answer a turn: those in a row are joined")
    empty_answer: bool = _can(True, no="it refuses answers without text: they are left out")
    shows_tools: bool = _can(True, no="it shows no tools")
    tool_fields: frozenset[str] = frozenset()  # that it demands, and clients may leave out
    shows_calls: bool = _can(True, no="it shows no calls of tools")
    shows_results: bool = _can(True, no="it shows no results of tools")
    pictures_of_tools: bool = False  # it shows pictures in the results of tools; else they go as a user's behind them
    function_call: bool = True  # OpenAI's older names: function_call, and the role function; hardly any does
    arguments: Literal["object", "text"] = _can("object", text="a call's arguments go as text")
    cut_arguments: bool = _can(True, no="a call's arguments that are no JSON object go as an object with that text")
    call_content: Literal["empty", "null", "absent"] = _can(
        "empty", null="a call without text has the content null", absent="a call without text has no content"
    )
    result_names: bool = _can(False, yes="the results of tools get the names of the tools")
    text_with_call: bool = _can(True, no="an answer with text and a call goes as two turns")
    text_with_thought: bool = _can(True, no="an answer with text, reasoning and a call goes as two turns")
    thought_with_call: bool = _can(True, no="it refuses reasoning with a call: the reasoning is left out")
    parallel_calls: bool = _can(True, no="it takes one call a turn: several go one by one, each with its result")
    user_after_result: Literal["taken", "answered", "joined"] = _can(
        "taken", answered="between the result of a tool and a user's message goes an answer that says nothing",
        joined="a user's message after the result of a tool goes with the result",
    )  # fmt: skip
    thinks_when_asked: bool = False  # it makes the model reason only where its switches are on
    lost: frozenset[str] = frozenset()  # what is lost or refused, however it is put

    @cached_property
    def as_sent(self) -> bool:
        """Nothing has to be changed, but for contents of several parts and older names."""
        kept = {
            name: getattr(self, name) for name in ("parts", "function_call", "pictures_of_tools", "thinks_when_asked")
        }
        return self == Capabilities(**kept)

    def deviations(self) -> Iterator[str]:
        """A line for each thing that is not taken as clients send it."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "tool_fields" and value:
                yield f"it demands fields of tools that may be left out, and gets them: {', '.join(sorted(value))}"
            elif spec.name == "lost" and value:
                yield from (f"it loses or refuses, however it is put: {what}" for what in sorted(value))
            elif value != spec.default:
                word = {True: "yes", False: "no"}.get(value) if isinstance(value, bool) else value
                if word in spec.metadata.get("lines", ()):
                    yield spec.metadata["lines"][word]

    def described(self) -> dict[str, Any]:
        """The fields, for JSON."""
        found = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in found.items()}


AS_SENT = Capabilities()
