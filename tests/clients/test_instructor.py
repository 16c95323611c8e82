"""instructor: answers as pydantic objects, whole and as they come."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.slow

FRANCE: Any = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]


class Capital(BaseModel):
    capital: str


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    certain: bool


def patched(base_url: str, mode: str, kind: Any = openai.OpenAI) -> Any:
    import instructor

    client = kind(base_url=base_url, api_key="none", max_retries=0, timeout=240)
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "JSON"])
def test_create(base_url: str, mode: str) -> None:
    client = patched(base_url, mode)
    answer = client.chat.completions.create(
        model="demo", messages=FRANCE, response_model=Capital, temperature=0, max_retries=0, max_tokens=60
    )
    assert isinstance(answer, Capital) and answer.capital


def test_any_form(base_url: str) -> None:
    """The demo model knows nothing of this form: the server makes it keep to it."""
    verdict = patched(base_url, "JSON_SCHEMA").chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello!"}], response_model=Verdict, max_retries=0, seed=3
    )
    assert isinstance(verdict, Verdict)


def test_partial(base_url: str) -> None:
    parts = list(
        patched(base_url, "JSON_SCHEMA").chat.completions.create_partial(
            model="demo", messages=FRANCE, response_model=Capital, temperature=0, max_retries=0
        )
    )
    assert parts[-1].capital == "Paris" and len(parts) > 1


def test_async(base_url: str) -> None:
    async def run() -> Any:
        client = patched(base_url, "JSON_SCHEMA", openai.AsyncOpenAI)
        return await client.chat.completions.create(
            model="demo", messages=FRANCE, response_model=Capital, temperature=0, max_retries=0
        )

    assert asyncio.run(run()).capital == "Paris"


class Weather(BaseModel):
    """Get the weather of a city"""

    city: str


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT"])
def test_tools_mode(base_url: str, mode: str) -> None:
    """The answer is the arguments of a call that the model is made to write."""
    answer = patched(base_url, mode).chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "What is the weather in Oslo?"}], response_model=Weather,
        temperature=0, max_retries=0,
    )  # fmt: skip
    assert answer.city == "Oslo"


def test_parallel_tools_mode(base_url: str) -> None:
    from collections.abc import Iterable

    client = patched(base_url, "PARALLEL_TOOLS")
    answers = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "What is the weather in Paris and Rome?"}],
        response_model=Iterable[Weather], temperature=0, max_retries=0,
    )  # fmt: skip
    assert [answer.city for answer in answers] == ["Paris", "Rome"]
