"""A chat template is asked what it can take: small conversations are rendered, and what was said is looked for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from ..errors import ApiError
from .capabilities import AS_SENT, Capabilities
from .shape import Message, shape, shape_tools

CALLS = "a call with its arguments and its result"
SECONDS = 1.0  # of computing, for all questions: a good template takes 0.02; what is not asked then is taken as sent
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off
_SAID = re.compile(r"Kq\w+?Kz")
Render = Callable[[list[Message], dict[str, Any]], str]


def said(word: str) -> str:
    """A text that no template has, to be looked for in the prompt."""
    return f"Kq{word}Kz"


def tool(name: str = said("tool"), **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def call(index: int, arguments: Any = None, name: str = said("tool")) -> Message:
    arguments = {said("key"): said(f"argument{index}")} if arguments is None else arguments
    return {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(index: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{index}", "content": said(f"result{index}")}


def says(role: str, *words: str, **more: Any) -> Message:
    parts = [{"type": "text", "text": said(word)} for word in words]
    content: Any = parts if len(parts) > 1 else said(words[0]) if words else ""
    return {"role": role, "content": content, **more}


_KEY = {said("key"): {"type": "string", "description": "a word"}}
_SCHEMA = {"type": "object", "properties": _KEY, "required": [said("key")]}
TOOL = tool(description="says a word", parameters=_SCHEMA)
_USER, _NEXT, _ANSWER = says("user", "user1"), says("user", "user2"), says("assistant", "answer")
_SYSTEM, _OTHER, _DEVELOPER = says("system", "system1"), says("system", "system2"), says("developer", "developer")
_CALL = says("assistant", tool_calls=[call(1)])
_TEXT_AND_CALL = {**_CALL, "content": said("text")}
_THOUGHT = {"reasoning": "a thought", "reasoning_content": "a thought"}
_CUT = says("assistant", tool_calls=[call(1, f'{{"key": "{said("cut")}')])
_OLD_CALL = says("assistant", function_call=call(1)["function"])
_OLD_RESULT = {"role": "function", "name": said("tool"), "content": said("result1")}


@dataclass(frozen=True)
class Question:
    """What is said in these conversations must be in the prompt."""

    what: str
    chats: tuple[list[Message], ...]
    ways: tuple[dict[str, Any], ...]  # to put it otherwise, the best first
    lost: dict[str, Any] = field(default_factory=dict)  # what is known where none of them helps
    tools: tuple[dict[str, Any], ...] = ()
    shows_tools: bool = False  # the tools' names are to be there too
    calls: bool | None = None  # it is asked only where calls with arguments and results are shown, or are not


def _no(name: str) -> tuple[dict[str, Any], ...]:
    return ({name: False},)


_CALL_WAYS = tuple(
    {"arguments": arguments, "call_content": content, "result_names": named}
    for named, content, arguments in product((False, True), ("empty", "null", "absent"), ("object", "text"))
)
QUESTIONS = (
    Question("a system message", ([_SYSTEM, _USER],), _no("knows_system")),
    Question("a developer's message", ([_DEVELOPER, _USER],), _no("knows_developer")),
    Question("two system messages", ([_SYSTEM, _OTHER, _USER],), _no("many_systems")),
    Question(
        "a system's and a developer's message", ([_SYSTEM, _DEVELOPER, _USER], [_DEVELOPER, _SYSTEM, _USER]),
        _no("developer_beside_system"),
    ),
    Question("two users' messages in a row", ([_USER, _NEXT], [_USER, _ANSWER, _USER, _NEXT]), _no("user_turns")),
    Question(
        "two answers in a row", ([_USER, _ANSWER, says("assistant", "answer2"), _NEXT],), _no("assistant_turns")
    ),
    Question("an answer without text", ([_USER, says("assistant"), _NEXT],), _no("empty_answer")),
    Question(
        "a later system message",
        ([_SYSTEM, _USER, _ANSWER, _OTHER, _NEXT], [_USER, _ANSWER, _OTHER, _NEXT], [_USER, _ANSWER, _NEXT, _OTHER]),
        _no("later_system"),
    ),
    Question(
        "a later developer's message",
        ([_SYSTEM, _USER, _ANSWER, _DEVELOPER, _NEXT], [_USER, _ANSWER, _NEXT, _DEVELOPER]), _no("later_developer"),
    ),
    Question("tools", ([_USER],), (), {"shows_tools": False}, (TOOL,), True),
    Question(CALLS, ([_USER, _CALL, result(1)],), _CALL_WAYS[1:], tools=(TOOL,)),
    Question(
        "the names of tools that are called", ([_USER, says("assistant", tool_calls=[call(1, {"a": "b"})])],),
        _CALL_WAYS[1:], {"shows_calls": False}, (TOOL,), calls=False,
    ),
    Question(
        "results of tools", ([_USER, says("assistant", tool_calls=[call(1, {"a": "b"}, "a_tool")]), result(1)],),
        _CALL_WAYS[1:], {"shows_results": False}, (TOOL,), calls=False,
    ),
    Question(
        "a call with text",
        ([_USER, _TEXT_AND_CALL, result(1)], [_USER, _TEXT_AND_CALL, result(1), _ANSWER, _NEXT],
         [_USER, says("assistant", tool_calls=[call(2)]), result(2), _TEXT_AND_CALL, result(1)]),
        _no("text_with_call"), tools=(TOOL,), calls=True,
    ),
    Question(
        "a call with reasoning", ([_USER, {**_CALL, **_THOUGHT}, result(1)],), _no("thought_with_call"),
        tools=(TOOL,), calls=True,
    ),
    Question(
        "a call with text and reasoning", ([_USER, {**_TEXT_AND_CALL, **_THOUGHT}, result(1)],),
        _no("text_with_thought"), tools=(TOOL,), calls=True,
    ),
    Question(
        "two calls at once",
        ([_USER, {**_CALL, "tool_calls": [call(1), call(2)]}, result(1), result(2)],), _no("parallel_calls"),
        tools=(TOOL,), calls=True,
    ),
    Question(
        "arguments that were cut off", ([_USER, _CUT, result(1)],),
        _no("cut_arguments"), tools=(TOOL,), calls=True,
    ),
    Question(
        "a user's message after a result", ([_USER, _CALL, result(1), _NEXT],),
        ({"user_after_result": "answered"}, {"user_after_result": "joined"}), tools=(TOOL,), calls=True,
    ),
    Question(
        "a call by its older name", ([_USER, _OLD_CALL, _OLD_RESULT],), _no("function_call"), tools=(TOOL,), calls=True
    ),
)  # fmt: skip
# Tools as sparse as clients may give them, and what each of them may lack.
_BARE = {"type": "object", "properties": {said("key"): {}}}
_MANY = {"type": "object", "properties": {said("key"): {"type": ["string", "null"]}}}
SPARSE = (
    ("description", tool(parameters=_SCHEMA)),
    ("parameters", tool(description="says a word")),
    ("parameters", tool(description="says a word", parameters={})),
    ("parameters", tool(description="says a word", parameters={"type": "object"})),
    ("properties", tool(description="says a word", parameters=_BARE)),
    ("properties", tool(description="says a word", parameters=_MANY)),
)


def ask(render: Render, seconds: float = SECONDS) -> Capabilities:
    """What the template can take of which `render` (messages, variables) gives prompts, or raises ApiError. `seconds`
    of computing are spent on it.

    A template that does not even show a user's words is left alone: it is there for something else.
    """
    asking = _Asking(render, seconds)
    with suppress(OutOfTimeError):
        asking.ask()
    return asking.can


def written_call(render: Render, can: Capabilities, count: int = 1) -> str:
    """What the template writes of an answer that is a call of `TOOL`, or `count` of them, from where the model would
    begin to what ends a turn; empty where it writes none."""

    def prompt(*chat: Message, begun: bool = False) -> str:
        variables = {"add_generation_prompt": begun, "tools": shape_tools([TOOL], can)}
        try:
            return render(shape(list(chat), can), variables)
        except ApiError:
            return ""

    if not (can.shows_tools and can.shows_calls) or (count > 1 and not can.parallel_calls):
        return ""
    calls = {**_CALL, "tool_calls": [call(index + 1) for index in range(count)]}
    whole, before, text = prompt(_USER, calls), prompt(_USER, begun=True), prompt(_USER, _ANSWER)
    at = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), min(len(whole), len(before)))
    if at < len(before):  # it would begin otherwise, such as with reasoning: from the line on where they part
        at = whole.rfind("\n", 0, at) + 1
    end = text.partition(_ANSWER["content"])[2]
    return whole[at:].removesuffix(end) if end else whole[at:]


class _Asking:
    def __init__(self, render: Render, seconds: float) -> None:
        self._render = render
        self._until = time.thread_time() + seconds
        self.can = AS_SENT  # so far
        self._offered: tuple[dict[str, Any], ...] = ()  # in each chat, where the template demands tools

    def ask(self) -> None:
        can = AS_SENT
        if not self._shows(can, [_USER]):
            if self._shows(can, [_USER], (TOOL,)):
                self._offered = (TOOL,)
            elif self._shows(no_text := replace(can, takes_text=False), [_USER]):
                can = no_text
            else:
                return
        for question in QUESTIONS:
            if question.calls in (None, CALLS not in can.lost):
                self.can = can = self._answered(question, can)
        if not (can.shows_calls and can.shows_results):  # which says it
            can = replace(can, lost=can.lost - {CALLS})
        if can.shows_tools:
            self.can = can = replace(can, tool_fields=frozenset(self._demanded(can)))
        self.can = can = replace(can, parts=frozenset(self._taken_in_parts(can)))
        self.can = can = replace(can, pictures_of_tools=self._shows_pictures_of_tools(can))
        self.can = replace(can, thinks_when_asked=self._thinks_when_asked(can))

    def _thinks_when_asked(self, can: Capabilities) -> bool:
        """Whether a chat looks the same with the switches off as with none set, and otherwise with them on."""
        said, off, on = (
            self._prompt(can, [_USER], switches=dict.fromkeys(SWITCHES, value) if value is not None else {})
            for value in (None, False, True)
        )
        return said == off != on

    def _shows_pictures_of_tools(self, can: Capabilities) -> bool:
        """Whether a picture beside the text of a result changes the prompt, and not by the list being printed."""
        if not can.shows_results:
            return False
        other, text = replace(can, pictures_of_tools=True), {"type": "text", "text": said("result1")}
        seen, unseen = (
            self._prompt(other, [_USER, _CALL, {**result(1), "content": content}], (TOOL,))
            for content in ([{"type": "image"}, text], said("result1"))
        )
        return said("result1") in seen and seen != unseen and "'type'" not in seen and '"type": "image"' not in seen

    def _answered(self, question: Question, can: Capabilities) -> Capabilities:
        for way in ({}, *question.ways):
            other = replace(can, **way)
            if all(self._shows(other, chat, question.tools, question.shows_tools) for chat in question.chats):
                return self._as_text(question, other) if question.what == CALLS else other
        if question.lost:
            return replace(can, **question.lost)
        return replace(can, lost=can.lost | {question.what})

    def _as_text(self, question: Question, can: Capabilities) -> Capabilities:
        """Arguments that are written as Python prints an object are meant to come as text."""
        if can.arguments == "text" or str(call(1)["function"]["arguments"]) not in self._prompt(can, question.chats[0]):
            return can
        other = replace(can, arguments="text")
        return other if self._shows(other, question.chats[0], question.tools) else can

    def _demanded(self, can: Capabilities) -> Iterator[str]:
        demanded: set[str] = set()
        for name, sparse in SPARSE:
            can = replace(can, tool_fields=frozenset(demanded))
            if self._shows(can, [_USER], (sparse,), True):
                continue
            if self._shows(replace(can, tool_fields=frozenset((*demanded, name))), [_USER], (sparse,), True):
                demanded.add(name)
        yield from demanded

    def _taken_in_parts(self, can: Capabilities) -> Iterator[str]:
        """Roles whose content may be a list: the texts of both parts are there, and nothing of the list itself."""
        chats = {
            "user": [says("user", "part1", "part2")],
            "system": [says("system", "part1", "part2"), _USER],
            "developer": [says("developer", "part1", "part2"), _USER],
            "assistant": [_USER, says("assistant", "part1", "part2"), _NEXT],
            "tool": [_USER, _CALL, {**result(1), "content": says("tool", "part1", "part2")["content"]}],
        }
        for role, chat in chats.items():
            if (role == "developer" and not can.knows_developer) or (role == "tool" and not can.shows_results):
                continue
            other = replace(can, parts=frozenset((role,)))
            if self._shows(other, chat, (TOOL,) if role == "tool" else ()):
                prompt = self._prompt(other, chat)
                between = prompt[prompt.find(said("part1")) : prompt.find(said("part2"))]
                if "text" not in between:
                    yield role

    def _shows(
        self, can: Capabilities, chat: list[Message], tools: tuple[dict[str, Any], ...] = (), named: bool = False
    ) -> bool:
        """Whether the prompt has everything that is said, in this order but for rules; `named`: and the tools."""
        prompt = self._prompt(can, chat, tools)
        names = [one["function"]["name"] for one in tools] if named else []
        return all(name in prompt for name in names) and not missing(prompt, chat, shape(chat, can))

    def _prompt(
        self,
        can: Capabilities,
        chat: list[Message],
        tools: tuple[dict[str, Any], ...] = (),
        switches: dict[str, bool] | None = None,
    ) -> str:
        """Empty where the template refuses. Raises OutOfTimeError. `switches`: further variables."""
        if time.thread_time() > self._until:
            raise OutOfTimeError
        variables: dict[str, Any] = {"add_generation_prompt": True, **(switches or {})}
        if tools := tools or self._offered:
            variables["tools"] = shape_tools(list(tools), can)
        try:
            return self._render(shape(chat, can), variables)
        except ApiError:
            return ""


class OutOfTimeError(Exception):
    """The template takes long: nothing more is asked."""


def missing(prompt: str, chat: list[Message], shaped: list[Message]) -> list[str]:
    """What was said in `chat` and is not in the prompt, or stands otherwise than in `shaped`; rules stand anywhere."""
    lost = [mark for message in chat for piece in _pieces(message) for mark in piece if mark not in prompt]
    at = 0
    for message in shaped:
        rules = message["role"] in ("system", "developer")
        for piece in _pieces(message):
            found = [prompt.find(mark, 0 if rules else at) for mark in piece]
            lost += [mark for mark, place in zip(piece, found, strict=True) if place < 0]
            if not rules:
                at = max(at, *found, 0)
    return lost


def marks(value: Any) -> list[str]:
    """All that there are in a text, or in whatever prints as one."""
    return _SAID.findall(str(value))


def _pieces(message: Message) -> Iterator[list[str]]:
    """The marks of the text, and of each call."""
    yield marks(message.get("content"))
    calls = [one["function"] for one in message.get("tool_calls", ())]
    for function in (*calls, message.get("function_call")):
        if function is not None:
            yield marks([function["name"], function["arguments"]])
