"""Calls as text: a format that cannot read what the template writes is the wrong one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vserve.server.options.config import ServerConfig
from vserve.server.parsers.formats import known
from vserve.server.text import tokenizer
from vserve.server.text.capabilities import Capabilities
from vserve.server.text.model import TextModel, load_text_model
from vserve.server.text.probe import SECONDS
from vserve.server.text.tool_text import ToolText, calls_in

from ..server.conftest import byte_level_tokenizer, save_tokenizer
from .histories import TOOLS

BODY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
TOOLS_SHOWN = "{{ tools | tojson if tools else '' }}"
SIGN = "{# <tool_call> and json #}"  # by which hermes is found
HERMES = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
HUNYUAN = (
    '<tool_calls>[{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]</tool_calls>'
)
OTHER = "«{{ c.function.name }}: {{ c.function.arguments | tojson }}»"


def load(folder: Path, template: str, **options: Any) -> TextModel:
    save_tokenizer(folder, byte_level_tokenizer(), template, eos_token="<|im_end|>")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_text_model(str(folder), ServerConfig(**options))


def writing(call: str) -> str:
    return f"{SIGN}{TOOLS_SHOWN}{BODY}{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}<|im_end|>{{% endfor %}}"


@pytest.mark.parametrize("call, name", [(HERMES, "hermes"), (HUNYUAN, "hunyuan_a13b"), (OTHER, None)])
def test_the_format_reads_what_the_template_writes(
    tmp_path: Path, call: str, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    source = writing(call).replace(SIGN, "{{ '' if true else '<tool_call> json' }}")
    tools = load(tmp_path, source).formats.tools
    assert (tools and tools.name) == name
    assert ("does not read the calls" in caplog.text) == (name is None)
    named = load(tmp_path, source, tool_call_parser="hermes").formats.tools
    assert named is not None and named.name == "hermes"  # whoever names one is not corrected


@pytest.mark.parametrize("format", known()[0], ids=lambda format: format.name)
def test_written_calls_are_read(format: Any) -> None:
    """In the model's own format, or as a JSON list where its arguments are neither JSON nor Python's."""
    text = ToolText.of(format)
    assert text.format.name in (format.name, "json")
    calls = [("first", {"word": 'a "b"'}), ("second", {"n": 1})]
    assert calls_in(text.calls(calls[:1]), ["first"], text.format) == calls[:1]
    if text.format.separator or text.format.opening != text.format.closing:
        assert calls_in(text.calls(calls), ["first", "second"], text.format)[:1] == calls[:1]


def test_what_is_not_shown_is_written_into_the_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = load(tmp_path, BODY + "{% endfor %}", tools_in_system=True)
    assert model.formats.tools is not None and model.formats.tools.name == "json"
    assert "shows no tools: they are written into the messages (--tools-in-system), calls in the format json" in (
        caplog.text
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    prompt = model.tokenizer.render(chat, {"tools": TOOLS})
    assert prompt.startswith("[system]Be kind.\n\nYou can call these functions")
    assert all(tool["function"]["name"] in prompt for tool in TOOLS)
    assert prompt.endswith('[assistant]I look.\n\n[{"name": "f", "parameters": {"x": 1}}][user]Result of f:\n2')


def test_a_template_that_shows_them_is_left_alone(tmp_path: Path) -> None:
    model = load(tmp_path, writing(HERMES), tools_in_system=True)
    assert model.tokenizer.tool_text is None
    can = replace(model.tokenizer.capabilities(model.tokenizer.template()), function_call=True)
    assert can.as_sent


def test_results_without_ids_are_those_of_the_calls_before_them_in_order() -> None:
    """Older clients give none: a result is not taken for that of any call that has none either."""
    text = ToolText.of(None)
    can = Capabilities(shows_calls=False, shows_results=False)
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("first", "second")]
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}]
    messages, _ = text.written([{"role": "assistant", "content": "", "tool_calls": calls}, *results], None, can)
    heads = [message["content"].partition(":")[0] for message in messages[1:]]
    assert heads == ["Result of first", "Result of second", "Result of the function"]


def test_a_template_that_came_in_a_request_is_asked_for_less_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    model = load(tmp_path, BODY + "{% endfor %}")
    monkeypatch.setattr(tokenizer, "ask", lambda render, seconds: asked.append(seconds) or Capabilities())
    source = "{{ messages[0].content }} by a request"
    model.tokenizer.render([{"role": "user", "content": "Hi"}], {"chat_template": source})
    assert asked == [tokenizer.REQUEST_SECONDS] and tokenizer.REQUEST_SECONDS < SECONDS / 5
