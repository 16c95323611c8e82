"""Llama 3.1 to 3.3: the whole message is {"name": …, "parameters": {…}}, more of them after a semicolon; or such calls
follow <|python_tag|>."""

from __future__ import annotations

import json

from .formats import Detection, ToolFormat
from .reader import Reader
from .text_reader import Reading

TAG = "<|python_tag|>"


def read(reader: Reader) -> Reading[None]:
    while True:
        while (yield from reader.json_call(needs_arguments=True)):
            if not (yield from reader.skip(";", ",")):
                break
        if not (yield from reader.text_until(TAG)):
            return


FORMATS = (
    ToolFormat(
        name="llama3_json",
        aliases=("llama", "llama3", "llama4_json"),
        detection=Detection(
            any=(TAG, '"parameters": dictionary of argument name'),
            none=("<tool_call>", "start_tag"),
            model_types=("llama",),
        ),
        read=read,
        begin=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ',
        end="}",
        separator="; ",
        markers=(TAG,),
    ),
)
