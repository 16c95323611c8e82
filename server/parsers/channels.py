"""gpt-oss: an answer is messages in channels, divided by the tokens <|start|>, <|channel|>, <|message|> and <|end|>.
Thoughts are in the channel analysis, text in final and commentary; calls are messages to functions.name."""

from __future__ import annotations

import re

from .formats import Detection, ReasoningFormat, ToolFormat, const, sequence, star, until
from .reader import Reader
from .text_reader import Reading

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
NEXT = f"{END}{START}assistant"  # one message ends, and another one begins
_DETECTION = Detection(any=(f"{CHANNEL}analysis", f"{CHANNEL}commentary"))
_RECIPIENT = r"(?: ?to=(?P<{}>[^\s<]+))?"
_HEADER = re.compile(
    rf"\s*(?:<\|start\|>\s*assistant)?{_RECIPIENT.format('early')}\s*<\|channel\|>\s*(?P<channel>\w+)"
    rf"{_RECIPIENT.format('late')}\s*(?:(?:<\|constrain\|>)?\s*\w+)?\s*"
)


def read_channels(reader: Reader, thinks: bool) -> Reading[None]:
    """`thinks`: what is in the channel analysis is reasoning."""
    said: bool | None = None  # whether what went out last was reasoning
    reader.mark()
    if (yield from reader.skip("to=")):  # the prompt ends with <|start|>assistant
        reader.unread("to=")
        if (yield from _message(reader, "")) is None:
            reader.reject()
    while found := (yield from reader.text_until(START, CHANNEL, END, CALL, RETURN)):
        if found not in (START, CHANNEL):  # between messages there is nothing
            reader.turn(thinking=False)
            continue
        reader.turn(thinking=False)
        channel = yield from _message(reader, found)
        if channel is None:
            reader.reject()
        elif channel:
            thinking = thinks and channel == "analysis"
            reader.turn(thinking, "\n" if thinking == said else "")
            said = thinking


def _message(reader: Reader, begun: str) -> Reading[str | None]:
    """Reads a header, and the arguments of a call. The channel of a text that follows; None: it is none of both."""
    word = yield from reader.word_until(MESSAGE)
    header = None if word is None else _HEADER.fullmatch(begun + word[0])
    if header is None:
        return None
    recipient = header["early"] or header["late"]
    if recipient is None:
        return header["channel"]
    name = recipient.removeprefix("functions.")
    if not reader.knows(name) or not (yield from reader.arguments(name)):
        return None
    yield from reader.skip(CALL, END)
    reader.mark()
    return ""


CALLS = ToolFormat(
    name="openai",
    aliases=("gpt_oss", "harmony"),
    detection=_DETECTION,
    read=lambda reader: read_channels(reader, thinks=False),
    begin=lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}",
    end="",
    separator=NEXT,
    trigger=f"{CHANNEL}commentary to=functions.",
    lead=star(sequence(const(f"{CHANNEL}analysis{MESSAGE}"), until(END), const(f"{START}assistant"))),
    content_begin=f"{CHANNEL}final{MESSAGE}",
    markers=MARKERS,
)
FORMATS = (
    CALLS,
    ReasoningFormat(
        name="openai_gptoss",
        aliases=("gpt_oss", "harmony", "openai"),
        # Of an answer without calls: all before its text may be thought.
        begin=f"{START}assistant",
        end=f"{CHANNEL}final{MESSAGE}",
        channels=lambda reader, opened: read_channels(reader, thinks=True),
        detection=_DETECTION,
        special=MARKERS,
    ),
)
