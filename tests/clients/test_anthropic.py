"""anthropic: messages whole and streamed, tools, counting, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

pytestmark = pytest.mark.slow

SUM: Any = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY: Any = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=240)


def test_create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=SUM, **GREEDY)
    (block,) = message.content
    assert block.type == "text" and block.text == "42"
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0
    assert message._request_id is not None and message.id == f"msg_{message._request_id}"


def test_the_streaming_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=SUM, **GREEDY) as stream:
        assert "".join(stream.text_stream) == "42"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.input_tokens + final.usage.cache_read_input_tokens > 0


def test_raw_events(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(messages=SUM, stream=True, **GREEDY)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_a_system_message_and_a_conversation(client: anthropic.Anthropic) -> None:
    history: Any = [{"role": "user", "content": "My name is Ada."}]
    first = client.messages.create(messages=history, **GREEDY)
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "What is my name?"}]
    second = client.messages.create(messages=history, system="You are a helpful assistant.", **GREEDY)
    assert second.content[0].type == "text" and "Ada" in second.content[0].text


def test_a_tool_loop(client: anthropic.Anthropic) -> None:
    history: Any = [{"role": "user", "content": "How is the weather?"}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(messages=history, tools=[WEATHER], tool_choice=choice, **GREEDY)
    (use,) = first.content
    assert use.type == "tool_use" and use.input["city"] in ("Paris", "Rome")
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=history, tools=[WEATHER], tool_choice={"type": "none"}, **GREEDY)
    assert second.stop_reason in ("end_turn", "max_tokens") and second.content[0].type == "text"


def test_the_model_uses_a_tool(client: anthropic.Anthropic) -> None:
    """Call, result, answer: nothing tells it to but the question."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{**WEATHER, "input_schema": schema}]
    history: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    with client.messages.stream(messages=history, tools=tools, **GREEDY) as stream:
        first = stream.get_final_message()
    (use,) = first.content
    assert use.type == "tool_use" and use.input == {"city": "Paris"} and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 21, "sky": "sunny"}'}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    (answer,) = client.messages.create(messages=history, tools=tools, **GREEDY).content
    assert answer.type == "text" and "sunny" in answer.text and "21" in answer.text


def test_thinking(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 100}
    with client.messages.stream(messages=SUM, thinking=thinking, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    thought, text = final.content
    assert thought.type == "thinking" and thought.thinking and thought.signature
    assert text.type == "text" and text.text == "42" and {"thinking", "signature", "text"} <= kinds
    assert final.usage.output_tokens_details is not None and final.usage.output_tokens_details.thinking_tokens > 0
    history: Any = [
        *SUM,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": "What is 10 + 5?"},
    ]
    again = client.messages.create(messages=history, **GREEDY).content[-1]
    assert again.type == "text" and again.text == "15"
    tight: Any = {"type": "enabled", "budget_tokens": 4}
    cut = client.messages.create(messages=SUM, thinking=tight, **GREEDY)
    assert cut.usage.output_tokens_details is not None and cut.usage.output_tokens_details.thinking_tokens <= 8


def test_a_streamed_tool_use(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=SUM, tools=[WEATHER], tool_choice=choice, **GREEDY) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (use,) = stream.get_final_message().content
    assert use.type == "tool_use" and use.input["city"] in ("Paris", "Rome") and len(pieces) > 1


def test_count_tokens(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="demo", messages=SUM).input_tokens
    usage = client.messages.create(messages=SUM, **GREEDY).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 5


def test_stop_sequences_and_limits(client: anthropic.Anthropic) -> None:
    counting: Any = [{"role": "user", "content": "Count from 1 to 9."}]
    stopped = client.messages.create(messages=counting, stop_sequences=["4"], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "4")
    cut = client.messages.create(messages=counting, **{**GREEDY, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"


def test_errors(client: anthropic.Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image") as wrong:
        client.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY)
    assert wrong.value.type == "invalid_request_error" and wrong.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=SUM, **{**GREEDY, "model": "other"})


def test_async(base_url: str) -> None:
    async def run() -> None:
        url = base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=240) as client:

            async def streamed(a: int) -> str:
                question: Any = [{"role": "user", "content": f"What is {a} + 5?"}]
                async with client.messages.stream(messages=question, **GREEDY) as stream:
                    return await stream.get_final_text()

            answers = await asyncio.gather(*(streamed(a) for a in range(10, 18)))
            assert answers == [str(a + 5) for a in range(10, 18)]

    asyncio.run(run())
