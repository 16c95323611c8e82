"""Calls in a section of their own, each between marks: DeepSeek V3 and V3.1, Kimi K2, Solar Open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .formats import Detection, ToolFormat, const, sequence
from .reader import Reader
from .text_reader import Reading

_OPENING, _CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```json"

_KIMI_OPENING, _KIMI_CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SOLAR_OPENING, _SOLAR_CLOSING = "<|tool_calls|>", "<|calls|>"
_SOLAR_BEGIN, _SOLAR_NAME, _SOLAR_ARGUMENTS, _SOLAR_END = (
    f"<|tool_call:{word}|>" for word in ("begin", "name", "args", "end")
)
_PREFIX = "functions."  # of a name in Kimi's ids


def section(
    openings: tuple[str, ...], begin: str, end: str, closings: tuple[str, ...], call: Callable[[Reader], Reading[bool]]
) -> Callable[[Reader], Reading[None]]:
    """`call` reads what stands between `begin` and `end`. A call that is none is text, and so is a line before the
    first one; those after it are calls all the same."""

    def read(reader: Reader) -> Reading[None]:
        while found := (yield from reader.text_until(*openings, begin)):
            before, whole = reader.num_calls, True
            if found == begin:
                reader.unread(found)
            elif (word := (yield from reader.word_until(begin, *openings, *closings))) is not None:
                reader.unread(word[0] + word[1])
                if word[0].strip() and word[1] == begin:
                    reader.mark()
                    continue
            while whole and (yield from reader.skip(begin)):
                whole = yield from call(reader)
                if whole:
                    yield from reader.skip(end)
                    reader.mark()
            if whole and reader.num_calls > before:
                yield from reader.skip(*closings)
            else:
                reader.reject()

    return read


def _deepseek(reader: Reader) -> Reading[bool]:
    """name<｜tool▁sep｜>{…}, or function<｜tool▁sep｜>name and {…} in a fence"""
    word = yield from reader.word_until(_SEP)
    if word is None:
        return False
    name = word[0].strip()
    if (yield from reader.peek()) == "{":
        return reader.knows(name) and (yield from reader.arguments(name))
    word = yield from reader.word_until("```")
    if word is None or not reader.knows(name := word[0].strip()):
        return False
    yield from reader.skip("json")
    if not (yield from reader.arguments(name)):
        return False
    yield from reader.skip("```")
    return True


def _kimi(reader: Reader) -> Reading[bool]:
    """functions.name:0<|tool_call_argument_begin|>{…}; the template wants this id again."""
    word = yield from reader.word_until(_KIMI_ARGUMENTS)
    if word is None:
        return False
    full, _, index = word[0].strip().rpartition(":")
    name = full.removeprefix(_PREFIX)
    if not (index.isascii() and index.isdecimal()) or not reader.knows(name):
        return False
    number = int(index)
    while (id := f"{_PREFIX}{name}:{number}") in reader.ids:
        number += 1
    reader.next_id = id
    return (yield from reader.arguments(name))


def _solar(reader: Reader) -> Reading[bool]:
    """id<|tool_call:name|>name<|tool_call:args|>{…}; the results have this id again."""
    id = yield from reader.word_until(_SOLAR_NAME)
    name = None if id is None else (yield from reader.word_until(_SOLAR_ARGUMENTS))
    if id is None or name is None or not reader.knows(name[0].strip()):
        return False
    if id[0].isalnum() and id[0] not in reader.ids:
        reader.next_id = id[0]
    return (yield from reader.arguments(name[0].strip()))


_V31 = ToolFormat(
    name="deepseek_v31",
    detection=Detection(any=(_SEP,), none=(_FENCE,)),
    read=section((_OPENING,), _BEGIN, _END, (_CLOSING,), _deepseek),
    opening=_OPENING,
    begin=lambda name: f"{_BEGIN}{name}{_SEP}",
    end=_END,
    closing=_CLOSING,
    trigger=_OPENING,
    markers=(_OPENING, _CLOSING, _BEGIN, _SEP, _END),
)
_V3 = replace(
    _V31,
    name="deepseek_v3",
    aliases=("deepseek_r1",),
    detection=Detection(any=(_SEP,)),
    begin=lambda name: f"{_BEGIN}function{_SEP}{name}\n{_FENCE}\n",
    end=f"\n```{_END}",
    separator="\n",
)
_KIMI = ToolFormat(
    name="kimi_k2",
    detection=Detection(any=(_KIMI_OPENING,)),
    read=section(
        (_KIMI_OPENING, _KIMI_OPENING.replace("calls", "call")),  # the model writes either
        _KIMI_BEGIN,
        _KIMI_END,
        (_KIMI_CLOSING, _KIMI_CLOSING.replace("calls", "call")),
        _kimi,
    ),
    opening=_KIMI_OPENING,
    begin=lambda name: f"{_KIMI_BEGIN}{_PREFIX}{name}:",
    after_name=sequence({"type": "regex", "pattern": "[0-9]{1,3}"}, const(_KIMI_ARGUMENTS)),
    end=_KIMI_END,
    closing=_KIMI_CLOSING,
    trigger=_KIMI_OPENING,
    markers=(_KIMI_OPENING, _KIMI_CLOSING, _KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END),
)
_SOLAR = ToolFormat(
    name="solar_open",
    detection=Detection(any=(_SOLAR_BEGIN,)),
    read=section((_SOLAR_OPENING,), _SOLAR_BEGIN, _SOLAR_END, (_SOLAR_CLOSING,), _solar),
    opening=_SOLAR_OPENING,
    before_name=sequence(const(_SOLAR_BEGIN), {"type": "regex", "pattern": "[a-z0-9]{10}"}),
    begin=lambda name: f"{_SOLAR_NAME}{name}{_SOLAR_ARGUMENTS}",
    end=_SOLAR_END,
    closing=_SOLAR_CLOSING,
    trigger=_SOLAR_OPENING,
    markers=(
        _SOLAR_OPENING, _SOLAR_BEGIN, _SOLAR_NAME, _SOLAR_ARGUMENTS, _SOLAR_END, _SOLAR_CLOSING,
    ),
)  # fmt: skip
FORMATS = (_V31, _V3, _KIMI, _SOLAR)
