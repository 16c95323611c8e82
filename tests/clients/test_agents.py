"""openai-agents: an agent over the Responses API and over chat, with tools, sessions and streaming."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import openai
import pytest

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # it reports to nobody

pytestmark = pytest.mark.slow

Kind = Literal["responses", "chat"]


def model(base_url: str, kind: Kind) -> Any:
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel

    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=240)
    made = OpenAIResponsesModel if kind == "responses" else OpenAIChatCompletionsModel
    return made(model="demo", openai_client=client)


def agent(base_url: str, kind: Kind, **options: Any) -> Any:
    from agents import Agent, ModelSettings

    settings = ModelSettings(temperature=0, max_tokens=200, **options.pop("settings", {}))
    return Agent(name="Demo", model=model(base_url, kind), model_settings=settings, **options)


@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_run(base_url: str, kind: Kind) -> None:
    from agents import Runner

    result = asyncio.run(Runner.run(agent(base_url, kind), "What is 12 + 30?"))
    assert result.final_output == "42"


@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_stream(base_url: str, kind: Kind) -> None:
    from agents import Runner

    async def run() -> tuple[str, str]:
        result = Runner.run_streamed(agent(base_url, kind), "What is 12 + 30?")
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, result.final_output

    assert asyncio.run(run()) == ("42", "42")


@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_a_tool_loop(base_url: str, kind: Kind) -> None:
    """The first call is demanded; the agent then lets the model speak."""
    from agents import Runner, function_tool

    seen = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        seen.append(city)
        return "sunny"

    told = agent(base_url, kind, tools=[get_weather], settings={"tool_choice": "required"})
    result = asyncio.run(Runner.run(told, "How is the weather in Paris?", max_turns=10))
    assert seen and set(seen) <= {"Paris", "Rome"}
    assert isinstance(result.final_output, str)


@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_the_model_uses_a_tool(base_url: str, kind: Kind) -> None:
    """Call, result, answer: nothing tells it to but the question."""
    from agents import Runner, function_tool

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        assert city == "Paris"
        return '{"temperature": 21, "sky": "sunny"}'

    result = asyncio.run(Runner.run(agent(base_url, kind, tools=[get_weather]), "What is the weather in Paris?"))
    assert "sunny" in result.final_output and "21" in result.final_output


def test_previous_response_id(base_url: str) -> None:
    from agents import Runner

    async def run() -> str:
        one = agent(base_url, "responses")
        first = await Runner.run(one, "My name is Ada.")
        second = await Runner.run(one, "What is my name?", previous_response_id=first.last_response_id)
        return second.final_output

    assert "Ada" in asyncio.run(run())


def test_structured_output(base_url: str) -> None:
    from agents import Runner
    from pydantic import BaseModel

    class Verdict(BaseModel):
        answer: Literal["yes", "no"]

    result = asyncio.run(Runner.run(agent(base_url, "responses", output_type=Verdict), "What is 12 + 30?"))
    assert isinstance(result.final_output, Verdict)
