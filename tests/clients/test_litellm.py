"""litellm, as an OpenAI server and as a vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SUM = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module", params=["openai/demo", "hosted_vllm/demo"])
def options(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    return {"model": request.param, "api_base": base_url, "api_key": "none", "num_retries": 0, "temperature": 0}


def test_completion(options: dict[str, Any]) -> None:
    import litellm

    answer = litellm.completion(messages=SUM, **options)
    assert answer.choices[0].message.content == "42" and answer.usage.total_tokens > 0


def test_stream(options: dict[str, Any]) -> None:
    import litellm

    chunks = list(litellm.completion(messages=SUM, stream=True, stream_options={"include_usage": True}, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "42"
    rebuilt = litellm.stream_chunk_builder(chunks, messages=SUM)
    assert rebuilt.choices[0].message.content == "42" and rebuilt.choices[0].finish_reason == "stop"


def test_async(options: dict[str, Any]) -> None:
    import litellm

    async def run() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(messages=SUM, **options) for _ in range(4)))
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(run()) == ["42"] * 4


def test_structured_output(options: dict[str, Any]) -> None:
    import litellm

    schema = {"type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"]}
    answer = litellm.completion(
        messages=[{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}},
        **options,
    )
    assert answer.choices[0].message.content == '{"capital": "Paris"}'


def test_errors(options: dict[str, Any]) -> None:
    """litellm tells a context that is too long by our words, and acts on it."""
    import litellm

    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 5000}], **options)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=SUM, **{**options, "temperature": 9})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=SUM, **{**options, "model": options["model"].replace("demo", "other")})


@pytest.mark.parametrize(("model", "path"), [("hosted_vllm/demo", "/v1"), ("jina_ai/demo", "/v1"), ("cohere/demo", "")])
def test_rerank(model: str, path: str, base_url: str) -> None:
    """In the shapes of vLLM, Jina and Cohere."""
    import litellm

    documents = ["What is 12 + 30?", "A cat sleeps.", "The answer is 42."]
    address = base_url.removesuffix("/v1") + path
    asked = {"query": "12 + 30", "documents": documents, "top_n": 2}
    answer = litellm.rerank(model=model, api_base=address, api_key="none", **asked)
    first, second = answer.results
    assert first["relevance_score"] >= second["relevance_score"] and {first["index"], second["index"]} < {0, 1, 2}
