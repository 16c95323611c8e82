"""Calls as a JSON list after a word of their own: Command, Granite 3, Hunyuan, Jamba, Nemotron, Phi 4 mini, xLAM; of
Apertus, whose list has objects with the tool's name as their only key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from .formats import Detection
from .json_list import GENERIC, json_begin, json_calls
from .json_text import as_string
from .reader import Reader
from .text_reader import Reading

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
    while word := (yield from reader.text_until(f"{_FENCE}json", "<tool_call>", "[TOOL_CALLS]", "</think>")):
        if word == "</think>":
            reader.reject()  # it is text, after which a list may begin
            if (yield from reader.peek()) == "[" and not (yield from _bare(reader)):
                reader.reject()
            continue
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


def _apertus(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until("<|tools_prefix|>")):
        whole = bool((yield from reader.skip("[")))
        while whole and (yield from reader.skip("{")):
            name = as_string((yield from reader.value()))
            whole = (
                reader.knows(name) and bool((yield from reader.skip(":"))) and (yield from reader.arguments(str(name)))
            )
            if not whole or not (yield from reader.skip("}")) or not (yield from reader.skip(",")):
                break
        if whole:
            yield from reader.skip("]")
            yield from reader.skip("<|tools_suffix|>")
            reader.mark()
        else:
            reader.reject()


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
        name="nemotron",
        aliases=("nemotron_nano_v2",),
        detection=Detection(any=("<TOOLCALL>",)),
        read=after("<TOOLCALL>", closing=("</TOOLCALL>",)),
        opening="<TOOLCALL>[",
        closing="]</TOOLCALL>",
        trigger="<TOOLCALL>",
        markers=("<TOOLCALL>", "</TOOLCALL>"),
    ),
    replace(
        _LIST,
        name="cohere",
        aliases=("command_r7b", "command_a", "cohere_command3"),
        detection=Detection(any=("<|START_ACTION|>",)),
        read=after("<|START_ACTION|>", closing=("<|END_ACTION|>",)),
        opening="<|START_ACTION|>[\n    ",
        before_name={"type": "regex", "pattern": r'\{"tool_call_id": "[0-9]{1,3}", '},
        begin=lambda name: f'"tool_name": {json.dumps(name)}, "parameters": ',
        separator=",\n    ",
        closing="\n]<|END_ACTION|>",
        trigger="<|START_ACTION|>",
        markers=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    replace(
        _LIST,
        name="apertus",
        detection=Detection(any=("<|tools_prefix|>",)),
        read=_apertus,
        opening="<|tools_prefix|>[",
        begin=lambda name: f"{{{json.dumps(name)}: ",
        closing="]<|tools_suffix|>",
        trigger="<|tools_prefix|>",
        markers=("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    replace(
        _LIST,
        name="xlam",
        detection=Detection(any=("make calls in a single JSON array", '"tool_call_name"')),
        read=_xlam,
    ),
)
