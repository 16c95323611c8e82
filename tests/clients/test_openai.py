"""openai: sync and async, whole and streamed, its streaming helpers and `parse`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

FRANCE: Any = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
SUM: Any = [{"role": "user", "content": "What is 12 + 30?"}]


class Capital(BaseModel):
    capital: str


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    reasons: list[Literal["a", "b"]] = Field(max_length=4)  # or a small model may never end it


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=240)


def test_chat(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    answer = client.chat.completions.create(model="demo", messages=SUM, temperature=0)
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens > answer.usage.completion_tokens > 0


def test_every_sampling_parameter(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"7": -1}, "logprobs": True, "top_logprobs": 3,
        "max_completion_tokens": 8, "n": 2, "seed": 4, "stop": ["\n"], "temperature": 0.9, "top_p": 0.9, "user": "me",
        "extra_body": {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.05, "min_tokens": 1},
    }  # fmt: skip
    one, two = (client.chat.completions.create(model="demo", messages=SUM, **options) for _ in range(2))
    assert [choice.message.content for choice in one.choices] == [choice.message.content for choice in two.choices]
    for choice in one.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0)
    stream = client.chat.completions.create(
        model="demo", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == '{"capital": "Paris"}'
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=FRANCE, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == '{"capital": "Paris"}'
    assert final.choices[0].message.role == "assistant"
    assert "content.delta" in kinds and kinds.count("content.done") == 1


def test_parse(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="demo", messages=FRANCE, response_format=Capital, temperature=0)
    assert parsed.choices[0].message.parsed == Capital(capital="Paris")
    # Whatever is asked, the answer has the form of the schema.
    verdict = client.chat.completions.parse(
        model="demo", messages=SUM, response_format=Verdict, temperature=1, seed=1, max_tokens=1000,
    )  # fmt: skip
    assert isinstance(verdict.choices[0].message.parsed, Verdict)


def test_parse_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=FRANCE, response_format=Capital, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Capital(capital="Paris")


def test_parse_says_when_the_answer_was_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=FRANCE, response_format=Capital, max_tokens=2)


def test_completions(client: openai.OpenAI) -> None:
    scored = client.completions.create(model="demo", prompt="Hello", max_tokens=1, echo=True, logprobs=1)
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text.startswith("Hello") and logprobs is not None
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
    both = client.completions.create(model="demo", prompt=["Hello", "What"], max_tokens=4, stream=True)
    assert {chunk.choices[0].index for chunk in both if chunk.choices} == {0, 1}


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=SUM, temperature=9)
    assert wrong.value.param == "temperature" and wrong.value.code == "invalid_value" and wrong.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=SUM)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="demo", prompt=[7] * 5000)


def test_async(base_url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=240) as client:

            async def streamed(a: int) -> str:
                question: Any = [{"role": "user", "content": f"What is {a} + 5?"}]
                async with client.chat.completions.stream(model="demo", messages=question, temperature=0) as stream:
                    return (await stream.get_final_completion()).choices[0].message.content or ""

            answers = await asyncio.gather(*(streamed(a) for a in range(10, 26)))
            assert answers == [str(a + 5) for a in range(10, 26)]
            parsed = await client.chat.completions.parse(model="demo", messages=FRANCE, response_format=Capital)
            assert parsed.choices[0].message.parsed == Capital(capital="Paris")

    asyncio.run(run())
