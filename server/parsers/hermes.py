"""Hermes 2 Pro and 3, Qwen 2.5 and 3: each call is a JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

import json

from .formats import Detection, ToolFormat
from .reader import Reader
from .text_reader import Reading

BEGIN, END = "<tool_call>", "</tool_call>"


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(BEGIN)):
        if not (yield from reader.json_call()):
            reader.reject()
            continue
        while (yield from reader.skip("}")) or ((yield from reader.peek()) == "{" and (yield from reader.json_call())):
            pass  # some models close a brace too many, or write several calls in one pair
        yield from reader.skip(END)


FORMATS = (
    ToolFormat(
        name="hermes",
        aliases=("qwen", "qwen25", "qwen3"),
        # The others write something else between the same tags.
        detection=Detection(
            any=(BEGIN,), none=("<function=", "<arg_key>", "<tool_calls>", "minimax"), model_types=("qwen2", "qwen3")
        ),
        read=read,
        begin=lambda name: f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ',
        end=f"}}\n{END}",
        separator="\n",
        trigger=BEGIN,
        markers=(BEGIN, END),
    ),
)
