"""Sessions of agents find their history in the prefix cache: what comes back is what was read and written before, token
by token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel, load_text_model

DEMO = Path(__file__).parents[2] / "configs" / "demo"
TURNS = 10
BLOCK = 16  # tokens, of which the cache knows whole ones
SHARE = 0.95  # of the tokens of all prompts but the first
# Agents have long instructions, beside which a turn is short.
SYSTEM = " ".join(f"Rule {number}: be kind, be brief, and never invent anything." for number in range(60))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ABOUT = {"name": "get_weather", "description": "The weather in a city."}
BILLING = "x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=cli; cch={:05};"


@pytest.fixture(scope="module")
def demo() -> TextModel:
    return load_text_model(str(DEMO), ServerConfig(served_model_name=("demo",)))


class Session:
    """A server whose model writes what it is told, and what a cache that keeps everything has of each prompt."""

    def __init__(self, server: Any, model: TextModel) -> None:
        self._server, self._model = server, model
        info = server.engine.info
        server.engine.info = msgspec.structs.replace(info, max_model_len=16384, vocab_size=4096)
        self._end = model.tokenizer.core.token_to_id("<|im_end|>")
        self._before: list[int] = []
        self._cached: list[int] = []
        self._sizes: list[int] = []

    def ask(self, path: str, says: str, body: dict[str, Any]) -> dict[str, Any]:
        ids = [*self._model.tokenizer.encode(says, False), self._end]
        self._server.engine.script = lambda request: [ids]
        answer = self._server.client.post(path, body)
        assert answer.status_code == 200, answer.text
        prompt = list(self._server.engine.submitted[-1].token_ids)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._before, prompt, strict=False)))
        self._cached.append(same // BLOCK * BLOCK)
        self._sizes.append(len(prompt))
        self._before = prompt + ids
        value: dict[str, Any] = answer.json()
        return value

    def check(self) -> None:
        assert len(self._sizes) == 2 * TURNS
        share = sum(self._cached[1:]) / sum(self._sizes[1:])
        assert share >= SHARE, list(zip(self._cached, self._sizes, strict=True))


@pytest.fixture
def session(new_thinking: Callable[..., Any], demo: TextModel) -> Session:
    return Session(new_thinking(demo), demo)


def said(turn: int, thought: bool) -> tuple[str, str]:
    """What the model writes in a turn: a call, then what it makes of the result."""
    call = f'{{"name": "%s", "arguments": {{"city": "Köln", "days": {turn}}}}}'
    before = "<think>\nHm, the weather.\n</think>\n\n" if thought else ""
    return f"{before}Let me look.\n<tool_call>\n{call}\n</tool_call>", f"{before}Sunny on day {turn}."


@pytest.mark.parametrize("thoughts", ["none", "kept", "dropped"])
def test_messages_as_claude_code_sends_them(session: Session, thoughts: str) -> None:
    """`thoughts`: what the client does with them; the template drops those before the user's last message anyway."""
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        body: dict[str, Any] = {
            "max_tokens": 500, "tools": [{**ABOUT, "input_schema": SCHEMA}], "messages": messages,
            "system": [{"type": "text", "text": BILLING.format(turn)}, {"type": "text", "text": SYSTEM}],
        }  # fmt: skip
        if thoughts != "none":
            body["thinking"] = {"type": "adaptive"}
        call, end = said(turn, thoughts != "none")
        messages.append({"role": "user", "content": [{"type": "text", "text": f"And on day {turn}?"}]})
        for text in (call % ABOUT["name"], end):
            content = session.ask("/v1/messages", text, body)["content"]
            assert (content[0]["type"] == "thinking") == (thoughts != "none")
            if thoughts == "dropped":
                content = [block for block in content if block["type"] != "thinking"]
            messages.append({"role": "assistant", "content": content})
            uses = [block for block in content if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "sun"} for use in uses]
            if results:
                messages.append({"role": "user", "content": results})
    session.check()


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_responses_as_codex_sends_them(session: Session, stores: bool, thinks: bool) -> None:
    """The whole history each time, or what is new behind a stored response."""
    history: list[dict[str, Any]] = []
    previous = None
    function = {"type": "function", **ABOUT, "parameters": SCHEMA}
    tools = [{"type": "namespace", "name": "weather", "tools": [function]}, {"type": "web_search"}]
    for turn in range(TURNS):
        call, end = said(turn, thinks)
        new: list[dict[str, Any]] = [{"role": "user", "content": f"And on day {turn}?"}]
        for text in (call % "weather__get_weather", end):
            history += new
            answer = session.ask("/v1/responses", text, {
                "instructions": SYSTEM, "tools": tools, "store": stores, "previous_response_id": previous,
                "input": new if stores else history, "reasoning": {"effort": "high" if thinks else "none"},
            })  # fmt: skip
            previous = answer["id"] if stores else None
            history += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            assert [item["namespace"] for item in calls] == ["weather"] * (text != end)
            new = [{"type": "function_call_output", "call_id": item["call_id"], "output": "sun"} for item in calls]
    session.check()
