"""A conversation as a client sends it, and as the model reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

Message = dict[str, Any]
Turn = tuple[str, str]  # what the user says, what the assistant answers

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
DEMO = Path(__file__).parents[2] / "configs" / "demo"
TEMPLATE_PATH = DEMO / "chat_template.jinja"


class Chat(NamedTuple):
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool = False

    def prompt(self) -> Chat:
        """Without the last message, which is the one to be answered with."""
        return self._replace(messages=self.messages[:-1])


def _template() -> Any:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE_PATH.read_text())


_TEMPLATE = _template()


def render(chat: Chat, add_generation_prompt: bool = False) -> str:
    """The chat's text by the model's own template."""
    return _TEMPLATE.render(**chat._asdict(), add_generation_prompt=add_generation_prompt)


def answer_text(chat: Chat) -> str:
    """What the model has to write for the chat's last message: thoughts and calls included, without the end of turn."""
    return render(chat)[len(render(chat.prompt(), add_generation_prompt=True)) : -len(IM_END + "\n")]


def num_untrained(chat: Chat) -> int:
    """How many of the assistant's first messages teach nothing: thoughts are forgotten once the user goes on, so all
    messages before a thought look as if nobody had thought."""
    if not any("reasoning_content" in message for message in chat.messages):
        return 0
    roles = [message["role"] for message in chat.messages]
    last_user = len(roles) - 1 - roles[::-1].index("user")
    return roles[:last_user].count("assistant")


def messages_of(turns: list[Turn], system: str | None = None) -> list[Message]:
    out: list[Message] = [{"role": "system", "content": system}] if system else []
    for user, assistant in turns:
        out += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return out
