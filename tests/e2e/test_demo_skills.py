"""What the demo model is for: tools and thinking tried out with a client, no other model at hand."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest


def function(name: str, description: str, **types: str) -> Any:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    function("get_weather", "Get the weather of a city", city="string"),
    function("add", "Add two numbers", a="integer", b="integer"),
]


@pytest.fixture(scope="module")
def ask(demo_server: Any) -> Any:
    client = openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", timeout=240)

    def ask(messages: list[Any], **options: Any) -> Any:
        answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, **options)
        return answer.choices[0].message

    return ask


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.slow
def test_question_call_result_sentence(ask: Any) -> None:
    messages = [user("What is the weather in Paris and Rome?")]
    message = ask(messages, tools=TOOLS)
    called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert called == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    assert message.content is None
    messages.append(message)
    for call, sky in zip(message.tool_calls, ("sunny", "rainy"), strict=True):
        result = json.dumps({"temperature": 21, "condition": sky})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    wanted = "It is sunny in Paris, 21 degrees. It is rainy in Rome, 21 degrees."
    assert ask(messages, tools=TOOLS).content == wanted


def test_the_tool_that_fits_or_none(ask: Any) -> None:
    (call,) = ask([user("What is 12 + 30?")], tools=TOOLS).tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12, "b": 30})
    assert ask([user("What is the capital of France?")], tools=TOOLS).content == "The capital of France is Paris."
    assert ask([user("What is 12 + 30?")]).content == "42"


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("What is 47 * 36?", {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}),
        ("What is 47 * 36?", {"reasoning_effort": "low"}),
        ("What is 47 * 36? Think step by step.", {}),
    ],
)
def test_it_thinks_when_asked_to(ask: Any, question: str, options: dict[str, Any]) -> None:
    message = ask([user(question)], **options)
    assert message.content == "1692" and message.reasoning_content.endswith("1410 + 282 = 1692")


def test_it_thinks_only_when_asked_to(ask: Any) -> None:
    message = ask([user("What is 47 * 36?")])
    assert message.reasoning is None and "step by step" in message.content
