"""Conversations as agents have them, at random: every word that somebody says has a mark of its own."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from vserve.server.text.conversation import messages
from vserve.server.text.probe import marks, said, tool
from vserve.server.text.tokenizer import Tokenizer
from vserve.server.text.tool_text import ToolText

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = 10
WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}, "required": ["word"]}
TOOLS = [
    tool(said("lookup"), description="looks a word up", parameters=WORD),
    tool(said("list"), parameters=WORD),
    tool(said("ping")),
]


def tokenizer(source: str, *, in_system: bool = False) -> Tokenizer:
    """Of a template alone: it renders, and knows no tokens. `in_system`: as with --tools-in-system."""
    made = Tokenizer(FastTokenizer(models.BPE()), SPECIAL, {"default": source}, lambda: None)
    if in_system:
        made.tool_text = ToolText.of(None)
    return made


def history(seed: int, *, agent: bool) -> list[dict[str, Any]]:
    """`TURNS` turns of users, the last of which waits for an answer. `agent`: tools are called."""
    return _History(random.Random(seed), agent).messages


def lost(prompt: str, history: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[str]:
    """What somebody said, and the prompt does not have."""
    return [mark for mark in marks([*history, *(tools or ())]) if mark not in prompt]


def as_templates_get(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, checked as requests are."""
    return messages(history)


class _History:
    def __init__(self, chance: random.Random, agent: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._chance = chance
        self._numbers = count()
        for _ in range(chance.choice((0, 1, 1, 2))):
            self._says(chance.choice(("system", "system", "developer")))
        for turn in range(TURNS):
            if turn and chance.random() < 0.2:
                self._says(chance.choice(("system", "developer")))
            for _ in range(chance.choice((1, 1, 1, 2))):
                self._says("user")
            if turn < TURNS - 1:
                self._answer(agent)

    def _text(self) -> str:
        return said(f"word{next(self._numbers)}")

    def _says(self, role: str) -> None:
        content: Any = self._text()
        if self._chance.random() < 0.2:
            content = [{"type": "text", "text": content}, {"type": "text", "text": self._text()}]
        self.messages.append({"role": role, "content": content})

    def _answer(self, agent: bool) -> None:
        chance = self._chance
        while agent and chance.random() < 0.6:
            thought = {"reasoning": "a thought"} if chance.random() < 0.3 else {}
            content = self._text() if chance.random() < 0.4 else None
            calls = [self._call() for _ in range(chance.choice((1, 1, 2, 3)))]
            self.messages.append({"role": "assistant", "content": content, "tool_calls": calls, **thought})
            for call in calls:
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._text()})
            if chance.random() < 0.2:
                return  # the user interrupts
        thought = {"reasoning": "a thought"} if chance.random() < 0.2 else {}
        content = None if chance.random() < 0.1 else self._text()
        self.messages.append({"role": "assistant", "content": content, **thought})

    def _call(self) -> dict[str, Any]:
        number = next(self._numbers)
        arguments = json.dumps({"word": said(f"word{number}")})
        if self._chance.random() < 0.15:
            arguments = arguments[:-2]  # max_tokens cut it off
        name = self._chance.choice(TOOLS)["function"]["name"]
        return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
