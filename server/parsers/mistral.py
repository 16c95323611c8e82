"""Mistral: [TOOL_CALLS] and a list of JSON objects; newer models write [TOOL_CALLS]name[ARGS]{…}, each call by itself.
Reasoning stands between [THINK] and [/THINK]."""

from __future__ import annotations

import hashlib
import secrets
import string
from dataclasses import replace

from .formats import Detection, ReasoningFormat, ToolFormat
from .json_list import json_begin, json_calls
from .reader import Reader
from .text_reader import Reading

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9  # the templates refuse any other


def read(reader: Reader) -> Reading[None]:
    while (yield from reader.text_until(CALLS)):
        is_list = (yield from reader.peek()) in ("[", "{")
        if not (yield from (json_calls(reader) if is_list else _named(reader))):
            reader.reject()


def _named(reader: Reader) -> Reading[bool]:
    word = yield from reader.word_until(ARGS, CALL_ID, "{")
    if word is None or not reader.knows(word[0].strip()):
        return False
    name, stop = word[0].strip(), word[1]
    if stop == CALL_ID and (yield from reader.word_until(ARGS)) is None:
        return False
    if stop == "{":
        reader.unread("{")
    return (yield from reader.arguments(name))


def new_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


def history_id(id: str) -> str:
    """An id of another server's in the form that the templates accept; the same one each time."""
    if len(id) == _ID_LENGTH and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode(errors="replace")).hexdigest()[:_ID_LENGTH]


_LIST = ToolFormat(
    name="mistral",
    detection=Detection(any=(CALLS,), none=(ARGS,), model_types=("mistral", "mixtral")),
    read=read,
    opening=f"{CALLS}[",
    begin=json_begin,
    end="}",
    separator=", ",
    closing="]",
    trigger=CALLS,
    markers=(CALLS, ARGS, CALL_ID),
    new_id=new_id,
    history_id=history_id,
)
_NAMED = replace(
    _LIST,
    name="mistral_args",
    detection=Detection(any=(ARGS,)),
    opening="",
    begin=lambda name: f"{CALLS}{name}{ARGS}",
    end="",
    separator="",
    closing="",
)
FORMATS = (
    _LIST,
    _NAMED,
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", detection=Detection(any=("[THINK]",))),
)
