"""Calls as a JSON list after a word of their own: Granite 3, Hunyuan, Jamba, Phi 4 mini, xLAM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .formats import Detection
from .json_list import GENERIC, json_begin, json_calls
from .reader import Reader, Reading

_FENCE = "```"


def after(*words: str, closing: tuple[str, ...] = ()) -> Callable[[Reader], Reading[None]]:
    """Reads lists that follow one of these words, and each of what may close them."""

    def read(reader: Reader) -> Reading[None]:
        while (yield from reader.text_until(*words)):
            if not (yield from json_calls(reader)):
                reader.reject()
                continue
            for mark in closing:
                yield from reader.skip(mark)

    return read


def _xlam(reader: Reader) -> Reading[None]:
    """The whole message is a list, or has one in a fence or in tags."""
    if (yield from reader.peek()) == "[" and not (yield from _bare(reader)):
        reader.reject()
    while word := (yield from reader.text_until(f"{_FENCE}json", "<tool_call>", "[TOOL_CALLS]")):
        if (yield from reader.peek()) == "[" and (yield from _bare(reader)):
            yield from reader.skip(_FENCE if word.startswith(_FENCE) else "</tool_call>")
        else:
            reader.reject()


def _bare(reader: Reader) -> Reading[bool]:
    """A list of calls that nothing announces: it may be other JSON."""
    yield from reader.skip("[")
    while (yield from reader.json_call(needs_arguments=True)):
        if not (yield from reader.skip(",")):
            yield from reader.skip("]")
            return True
    return False


_LIST = replace(GENERIC, begin=json_begin, separator=", ")
FORMATS = (
    replace(
        _LIST,
        name="granite",
        detection=Detection(any=("<|tool_call|>",), none=("<|/tool|>",)),
        read=after("<|tool_call|>", "<tool_call>", closing=("</response>",)),
        opening="<|tool_call|>[",
        trigger="<|tool_call|>",
        markers=("<|tool_call|>",),
    ),
    replace(
        _LIST,
        name="hunyuan_a13b",
        aliases=("hunyuan", "jamba"),
        detection=Detection(any=("<tool_calls>",)),
        read=after("<tool_calls>", closing=("</tool_calls>", "</answer>")),
        opening="<tool_calls>[",
        closing="]</tool_calls>",
        trigger="<tool_calls>",
        markers=("<tool_calls>", "</tool_calls>"),
    ),
    replace(
        _LIST,
        name="phi4_mini_json",
        aliases=("phi4", "phi4_mini"),
        detection=Detection(any=("functools[", "<|/tool|>")),
        read=after("functools", "<|tool_call|>", closing=("<|/tool_call|>",)),
        opening="functools[",
        trigger="functools[",
        markers=("<|tool_call|>", "<|/tool_call|>"),
    ),
    replace(
        _LIST,
        name="xlam",
        detection=Detection(any=("make calls in a single JSON array", '"tool_call_name"')),
        read=_xlam,
    ),
)
