"""Tool calls and reasoning with random weights, over HTTP: what must be valid is, whatever the model would say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "turn": {
        "type": "object",
        "properties": {"to": {"enum": ["left", "right"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 359}},
        "required": ["to", "degrees"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {"now": {"type": "boolean"}}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
TURN = {"type": "function", "function": {"name": "turn"}}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def url(live_server: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path_factory: Any) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("caller")
    for file in tiny_model("qwen3", vocab_size=330, max_position_embeddings=2048).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for i, token in enumerate(("<tool_call>", "</tool_call>", "<think>", "</think>")):
        flags = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
        tokenizer["added_tokens"].append({"id": 300 + i, "content": token, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with live_server(folder, max_num_seqs=8, max_num_batched_tokens=256) as url:
        yield url


def ask(url: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 250, **body}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(url: str, **body: Any) -> tuple[list[list[str]], str, str | None]:
    """Calls (name and arguments), reasoning, finish reason."""
    calls: list[list[str]] = []
    reasoning, reason = "", None
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 250, "stream": True, **body}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=240) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    reasoning += choice["delta"].get("reasoning") or ""
                    reason = choice["finish_reason"] or reason
                    for call in choice["delta"].get("tool_calls", ()):
                        if "id" in call:
                            calls.append([call["function"]["name"], ""])
                        calls[call["index"]][1] += call["function"]["arguments"]
    return calls, reasoning, reason


def check(calls: list[list[str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("tools", [TOOLS, STRICT])
@pytest.mark.parametrize("choice", ["required", TURN])
def test_calls_that_must_be_are_valid_streamed_and_whole(url: str, tools: Any, choice: Any) -> None:
    for seed in range(3):
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1, "seed": seed}
        (said,) = ask(url, **body, **QUIET)["choices"]
        called = [[c["function"]["name"], c["function"]["arguments"]] for c in said["message"]["tool_calls"]]
        check(called)
        assert len(called) == 1 and said["message"]["content"] is None
        assert said["finish_reason"] == ("stop" if choice is TURN else "tool_calls")
        assert choice is not TURN or called[0][0] == "turn"
        assert stream(url, **body, **QUIET) == (called, "", said["finish_reason"])


def test_after_the_trigger_an_auto_call_is_valid(url: str) -> None:
    """The bias makes the random model call a tool; nothing else tells it how."""
    seen = 0
    for seed in range(4):
        body = {
            "tools": TOOLS,
            "temperature": 1,
            "seed": seed,
            "logit_bias": {"300": 100},
            "parallel_tool_calls": False,
        }
        calls, _, reason = stream(url, **body, **QUIET)
        check(calls)
        seen += reason == "tool_calls"
    assert seen == 4


def test_the_budget_ends_the_reasoning_and_then_the_call_must_come(url: str) -> None:
    body = {"tools": STRICT, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1,
            "seed": 1, "thinking_token_budget": 5, "chat_template_kwargs": {"think": True},
            "logit_bias": {"303": -100}}  # fmt: skip
    answer = ask(url, **body)
    message = answer["choices"][0]["message"]
    check([[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]])
    assert message["reasoning"] and message["content"] is None
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6  # and the end of it
    calls, reasoning, _ = stream(url, **body)
    assert reasoning == message["reasoning"] and calls[0][0] == message["tool_calls"][0]["function"]["name"]


def test_the_budget_holds_without_a_grammar(url: str) -> None:
    for budget in (0, 1, 9):
        answer = ask(url, thinking_token_budget=budget, chat_template_kwargs={"think": True}, temperature=1, seed=2,
                     logit_bias={"303": -100}, ignore_eos=True, max_tokens=20)  # fmt: skip
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 1
        assert answer["usage"]["completion_tokens"] == 20
    free = ask(url, chat_template_kwargs={"think": True}, logit_bias={"303": -100}, ignore_eos=True, max_tokens=20)
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20
    assert free["choices"][0]["message"]["content"] is None


def test_the_end_of_the_reasoning_must_be_allowed(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"think": True},
            "thinking_token_budget": 2, "max_tokens": 5}  # fmt: skip
    for allowed, status in (([70, 80], 400), ([70, 80, 303], 200)):
        response = httpx.post(f"{url}/v1/chat/completions", json=body | {"allowed_token_ids": allowed})
        assert response.status_code == status, response.text
        assert status == 200 or "the budget of thinking" in response.json()["error"]["message"]


def test_structured_output_starts_after_the_reasoning(url: str) -> None:
    answer = ask(
        url, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS["turn"]}},
        thinking_token_budget=4, chat_template_kwargs={"think": True}, temperature=1, seed=3, logit_bias={"303": -100},
    )  # fmt: skip
    message = answer["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMAS["turn"])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_a_schema_or_a_call(url: str) -> None:
    body = {
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS["stop"]}},
    }
    for bias, called in (({"300": 100}, True), ({"300": -100}, False)):
        (said,) = ask(url, **body, **QUIET, temperature=1, seed=1, logit_bias=bias, parallel_tool_calls=False)[
            "choices"
        ]
        assert ("tool_calls" in said["message"]) is called
        if not called and said["message"]["content"].startswith("{"):
            jsonschema.validate(json.loads(said["message"]["content"]), SCHEMAS["stop"])


def test_strict_tools_with_schemas_that_cannot_be_followed_are_refused(url: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]}
    for strict, status in ((True, 400), (False, 200)):
        tool = {"type": "function", "function": {"name": "hard", "parameters": schema, "strict": strict}}
        body = {"messages": [{"role": "user", "content": "Go."}], "tools": [tool], "max_tokens": 5}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240)
        assert answer.status_code == status, answer.text
        if strict:
            assert answer.json()["error"]["param"] == "tools" and "uniqueItems" in answer.json()["error"]["message"]
