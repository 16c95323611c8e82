"""openai's Responses API: whole and streamed, its helper and `parse`, tool loops over previous_response_id."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.slow

SUM = "What is 12 + 30?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=240)


def test_create(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo", input=SUM, temperature=0)
    assert response.output_text == "42" and response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0


def test_a_stream_of_events(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="demo", input=SUM, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "42" and events[-1].type == "response.completed"
    assert events[-1].response.output_text == "42"


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=SUM, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "42"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_parse(client: openai.OpenAI) -> None:
    seeded = {"seed": 1}
    parsed = client.responses.parse(
        model="demo", input=SUM, text_format=Verdict, temperature=1, max_output_tokens=1000, extra_body=seeded
    )
    assert isinstance(parsed.output_parsed, Verdict)
    with client.responses.stream(
        model="demo", input=SUM, text_format=Verdict, max_output_tokens=1000, extra_body=seeded
    ) as stream:
        events = list(stream)
    assert isinstance(events[-1].response.output_parsed, Verdict)


def test_a_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input="My name is Ada.", temperature=0)
    second = client.responses.create(
        model="demo", input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert "Ada" in second.output_text
    by_hand: Any = [{"role": "user", "content": "My name is Ada."}, *first.output]
    third = client.responses.create(
        model="demo", input=[*by_hand, {"role": "user", "content": "What is my name?"}], temperature=0, store=False
    )
    assert third.output_text == second.output_text
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_the_model_uses_a_tool(client: openai.OpenAI) -> None:
    """Call, result, answer: nothing tells it to but the question."""
    tool: Any = {**WEATHER, "strict": False, "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    }}  # fmt: skip
    asked: Any = {"model": "demo", "tools": [tool], "temperature": 0}
    first = client.responses.create(input="What is the weather in Paris?", **asked)
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id}
    result["output"] = json.dumps({"temperature": 21, "sky": "sunny"})
    second = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    assert "sunny" in second.output_text and "21" in second.output_text


def test_reasoning(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=SUM, reasoning={"effort": "high"}, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        final = stream.get_final_response()
    thought = final.output[0]
    assert thought.type == "reasoning" and thought.content is not None
    assert "".join(pieces) == thought.content[0].text != "" and final.output_text == "42"
    assert final.usage is not None and final.usage.output_tokens_details.reasoning_tokens > 0
    again: Any = [{"role": "user", "content": SUM}, *final.output, {"role": "user", "content": "What is 10 + 5?"}]
    assert client.responses.create(model="demo", input=again, temperature=0).output_text == "15"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_tool_loop(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "demo", "tools": [WEATHER], "temperature": 0}
    first = client.responses.create(input="How is the weather?", tool_choice=choice, parallel_tool_calls=False, **asked)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(input=[result], tool_choice="none", previous_response_id=first.id, **asked)
    assert second.status == "completed" and second.output[0].type == "message"
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens - 200


def test_a_streamed_call(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="demo", input="Weather?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    (call,) = (item for item in final.output if item.type == "function_call")
    assert "".join(pieces) == call.arguments
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


def test_cut_and_refused(client: openai.OpenAI) -> None:
    cut = client.responses.create(model="demo", input="Count from 1 to 20.", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    tools = [{"type": "web_search"}]
    raw = client.responses.with_raw_response.create(model="demo", input="x", max_output_tokens=3, tools=tools)
    assert raw.headers["x-vserve-ignored-params"] == "tools.web_search"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")


def test_async(base_url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=240) as client:

            async def streamed(a: int) -> str:
                async with client.responses.stream(model="demo", input=f"What is {a} + 5?", temperature=0) as stream:
                    return (await stream.get_final_response()).output_text

            answers = await asyncio.gather(*(streamed(a) for a in range(10, 18)))
            assert answers == [str(a + 5) for a in range(10, 18)]

    asyncio.run(run())
