"""GigaChat 3: a call is a JSON object after a token of its own, or in a message of its own."""

from __future__ import annotations

import json
from dataclasses import replace

from .formats import Detection, ToolFormat
from .reader import Reader
from .text_reader import Reading

TOKEN = "<|function_call|>"
ROLE, NEXT = "function call<|role_sep|>\n", "<|message_sep|>\n\n"


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(TOKEN, NEXT + ROLE, ROLE)):
        if not (yield from reader.json_call()):
            reader.reject()


_TOKEN = ToolFormat(
    name="gigachat31",
    detection=Detection(any=(TOKEN,)),
    read=read,
    begin=lambda name: f'{TOKEN}{{"name": {json.dumps(name)}, "arguments": ',
    end="}",
    trigger=TOKEN,
    markers=(TOKEN,),
)
FORMATS = (
    _TOKEN,
    replace(
        _TOKEN,
        name="gigachat3",
        detection=Detection(any=("'function call'",)),
        begin=lambda name: f'{NEXT}{ROLE}{{"name": {json.dumps(name)}, "arguments": ',
        trigger=NEXT + ROLE,
        markers=("<|role_sep|>", "<|message_sep|>"),
    ),
)
