"""The openai package, over a real socket, against the scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def sdk(port: int, kind: Any = openai.AsyncOpenAI) -> Any:
    return kind(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def test_async(serve: Any, engine: Any) -> None:
    async def test(port: int) -> None:
        async with sdk(port) as client:
            assert [model.id async for model in client.models.list()] == ["test", "alias"]
            assert (await client.models.retrieve("alias")).max_model_len == engine.info.max_model_len
            answer = await client.chat.completions.create(
                model="test", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, seed=1
            )
            assert [choice.message.content for choice in answer.choices] == ["Hello world!"] * 2
            assert answer.choices[0].logprobs.content[0].token == "Hello"
            assert answer.usage.prompt_tokens_details.cached_tokens == 4
            assert answer._request_id == answer.id.removeprefix("chatcmpl-")
            text = await client.completions.create(model="test", prompt=["a", "b"], logprobs=1, stop=["!"])
            assert [choice.text for choice in text.choices] == ["Hello world"] * 2

    serve(test)


def test_async_streams(serve: Any) -> None:
    async def test(port: int) -> None:
        async with sdk(port) as client:
            stream = await client.chat.completions.create(
                model="test", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world!"
            assert chunks[-1].usage.completion_tokens == 4 and all(chunk.usage is None for chunk in chunks[:-1])
            async with client.chat.completions.stream(model="test", messages=MESSAGES, n=2) as helper:
                final = await helper.get_final_completion()
            assert [choice.message.content for choice in final.choices] == ["Hello world!"] * 2
            assert [choice.message.role for choice in final.choices] == ["assistant"] * 2
            stream = await client.completions.create(model="test", prompt="a", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world!"

    serve(test)


def test_sync(serve: Any) -> None:
    def talk(port: int) -> None:
        with sdk(port, openai.OpenAI) as client:
            answer = client.chat.completions.create(model="test", messages=MESSAGES, max_completion_tokens=2)
            assert answer.choices[0].finish_reason == "length"
            stream = client.chat.completions.create(model="test", messages=MESSAGES, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello world!"

    async def test(port: int) -> None:
        await asyncio.to_thread(talk, port)

    serve(test)


def test_errors_have_their_classes(serve: Any, engine: Any) -> None:
    async def test(port: int) -> None:
        async with sdk(port) as client:

            async def create(**options: Any) -> Any:
                return await client.chat.completions.create(**{"model": "test", "messages": MESSAGES, **options})

            with pytest.raises(openai.NotFoundError) as missing:
                await create(model="other")
            assert missing.value.code == "model_not_found" and missing.value.param == "model"
            with pytest.raises(openai.BadRequestError) as bad:
                await create(max_tokens=10**6)
            assert bad.value.code == "context_length_exceeded"
            engine.die_after = engine.num_outputs + 2
            with pytest.raises(openai.APIError, match="The engine died"):
                async for _ in await create(stream=True):
                    pass
            with pytest.raises(openai.InternalServerError) as dead:  # any status of 500 and more
                await create()
            assert dead.value.status_code == 503

    serve(test)


def test_closing_a_stream_aborts(serve: Any, engine: Any) -> None:
    engine.delay, engine.script = 0.01, lambda request: [[50]] * 1000

    async def test(port: int) -> None:
        async with sdk(port) as client:
            stream = await client.chat.completions.create(model="test", messages=MESSAGES, stream=True)
            async for _ in stream:
                break
            await stream.close()
            async with asyncio.timeout(60):
                while engine.aborted != [0]:
                    await asyncio.sleep(0.01)

    serve(test)
