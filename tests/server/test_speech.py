"""How the answers to a chat are prepared; what is held meanwhile is given back where that fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from vserve.engine.link.sampling_params import SamplingParams
from vserve.server.generation.choice import Prompt
from vserve.server.generation.generation import PLAIN
from vserve.server.generation.prompt import turns_off_thinking
from vserve.server.generation.speech import Speech
from vserve.server.grammar.constraint import Constraint
from vserve.server.parsers.formats import ReasoningFormat
from vserve.server.text.model import TextModel
from vserve.server.text.probe import ask
from vserve.server.text.template import ChatTemplate
from vserve.server.wire.requests import ChatRequest


@pytest.mark.parametrize(
    ("source", "only_when_asked"),
    [
        ("{{ messages[0].content }}{% if thinking %}<think>{% endif %}", True),
        ("{% if enable_thinking %}Think first.{% endif %}{{ messages[0].content }}", True),
        ("{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}", False),  # by default
        ("{{ messages[0].content }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}", False),
        ("{{ messages[0].content }}", False),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_a_template_may_think_only_when_asked(source: str, only_when_asked: bool) -> None:
    assert ask(ChatTemplate(source).render).thinks_when_asked == only_when_asked


def test_what_a_template_was_asked_is_not_asked_for_a_request(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it thinks only when asked is known since it was loaded: nothing is rendered on the event loop."""
    rendered = []
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *arguments: rendered.append(arguments))
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    turns_off_thinking(request, text_model.tokenizer)
    assert not rendered


class Grammars:
    def __init__(self) -> None:
        self.held: list[str] = []

    async def acquire(self, constraint: Constraint, param: str, owner: str) -> str:
        self.held.append("key")
        return "key"

    def release(self, key: str) -> None:
        self.held.remove(key)


class Broken:
    """A tokenizer that cannot read the prompt's end."""

    class core:
        @staticmethod
        def decode(*_: object, **__: object) -> str:
            raise UnicodeError("no text")


def test_a_grammar_is_given_back_when_what_follows_fails() -> None:
    grammars = Grammars()
    speech = Speech(
        None,
        None,
        ReasoningFormat(name="think", begin="<think>", end="</think>"),
        True,
        None,
        ("response_format", Constraint("json", "{}")),
        "",
    )
    prompt = Prompt([1, 2, 3], SamplingParams(max_tokens=4))
    with pytest.raises(UnicodeError):
        asyncio.run(speech.prepare(grammars, "", [prompt], PLAIN, Broken()))  # type: ignore[arg-type]
    assert grammars.held == []


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
RESPONSE = ("/v1/responses", {"input": "Hi"})
MESSAGE = ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50})
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
FORMAT = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
OFF = {"enable_thinking": False}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "request_, more, thinks",
    [
        (CHAT, JSON, False),  # this template makes the model think only when asked
        (CHAT, JSON | {"chat_template_kwargs": OFF}, False),
        (CHAT, JSON | {"chat_template_kwargs": {"thinking": False}}, False),
        (CHAT, JSON | {"reasoning_effort": "none"}, False),
        (CHAT, JSON | {"reasoning_effort": "low"}, True),
        (CHAT, JSON | {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
        (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}, "chat_template_kwargs": OFF}, False),
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "none"}, False),
        (RESPONSE, {"text": FORMAT}, False),
        (RESPONSE, {"text": FORMAT, "reasoning": {"effort": "none"}}, False),
        (MESSAGE, {"output_config": FORMAT}, False),
        (MESSAGE, {"output_config": FORMAT, "thinking": {"type": "disabled"}}, False),
        (MESSAGE, {"output_config": FORMAT, "thinking": {"type": "adaptive"}}, True),
    ],
)
def test_a_grammar_lets_only_those_think_who_were_not_told_otherwise(
    new_thinking: Any, thinker: Any, request_: tuple[str, Any], more: dict[str, Any], thinks: bool, begun: bool
) -> None:
    """The template does not close the reasoning; where it has begun it, it must end before the grammar begins."""
    begin = "<think>\n" if begun else ""
    template = (
        f"{{{{ messages[0].content }}}}{{{{ tools or '' }}}}{{% if enable_thinking %}}!{{% endif %}}</think>:{begin}"
    )
    model = replace(thinker, tokenizer=thinker.tokenizer.with_template(template))
    server = new_thinking(model)
    server.says("Hello")
    path, body = request_
    answer = server.client.post(path, body | more)
    assert answer.status_code == 200, answer.text
    sampling = server.engine.submitted[-1].sampling
    assert sampling.grammar == "key"
    assert (sampling.thinking is not None) == (thinks or begun)
    assert sampling.thinking is None or sampling.thinking.open == begun


@pytest.mark.parametrize(
    ("more", "thinks"),
    [({}, False), ({"reasoning_effort": "low"}, True), ({"chat_template_kwargs": {"enable_thinking": True}}, True)],
)
def test_a_server_may_turn_thinking_off(new_thinking: Any, thinker: Any, more: dict[str, Any], thinks: bool) -> None:
    """For requests that do not say what they want."""
    tokenizer = thinker.tokenizer.with_template(
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}!{% endif %}</think>:"
    )
    tokenizer.template_kwargs = OFF
    server = new_thinking(replace(thinker, tokenizer=tokenizer))
    server.says("Hello")
    path, body = CHAT
    assert server.client.post(path, body | JSON | more).status_code == 200
    assert (server.engine.submitted[-1].sampling.thinking is not None) == thinks


def test_a_grammar_lets_those_think_who_do_so_unasked(new_thinking: Any, thinker: Any) -> None:
    template = (
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}!{% endif %}</think>:"
    )
    server = new_thinking(replace(thinker, tokenizer=thinker.tokenizer.with_template(template)))
    server.says("Hello")
    path, body = CHAT
    assert server.client.post(path, body | JSON).status_code == 200
    assert server.engine.submitted[-1].sampling.thinking is not None


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive"}])
def test_messages_have_no_block_of_thinking_unasked(new_thinking: Any, thinker: Any, thinking: Any) -> None:
    model = replace(thinker, tokenizer=thinker.tokenizer.with_template("{{ messages[0].content }}</think>:"))
    server = new_thinking(model)
    server.says("<think>Hm.</think>Hello", size=50)
    path, body = MESSAGE
    for stream in (False, True):
        answer = server.client.post(path, {**body, "thinking": thinking, "stream": stream}).text
        asked = thinking == {"type": "adaptive"}
        assert ('"type":"thinking"' in answer) == ("Hm" in answer) == asked
        assert "Hello" in answer
