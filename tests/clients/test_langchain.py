"""langchain-openai: ChatOpenAI and OpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

pytestmark = pytest.mark.slow


class Capital(BaseModel):
    """The capital of a country."""

    capital: str


@pytest.fixture(scope="module")
def chat(base_url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="demo", base_url=base_url, api_key=SecretStr("none"), temperature=0, max_retries=0)


def test_invoke(chat: Any) -> None:
    answer = chat.invoke([("system", "You are a helpful assistant."), ("human", "What is 12 + 30?")])
    assert answer.content == "42"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] > 0


def test_a_conversation(chat: Any) -> None:
    from langchain_core.messages import HumanMessage

    history: list[Any] = [HumanMessage("My name is Ada.")]
    history += [chat.invoke(history), HumanMessage("What is my name?")]
    assert "Ada" in chat.invoke(history).content


def test_stream(chat: Any) -> None:
    whole = chat.invoke("Hello!").content
    chunks = list(chat.stream("Hello!"))
    assert "".join(chunk.content for chunk in chunks) == whole and len(chunks) > 3


def test_batch_and_async(chat: Any) -> None:
    questions = [f"What is {a} + 5?" for a in range(10, 16)]
    expected = [str(a + 5) for a in range(10, 16)]
    assert [answer.content for answer in chat.batch(questions)] == expected
    assert [answer.content for answer in asyncio.run(chat.abatch(questions))] == expected


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(chat: Any, method: str) -> None:
    structured = chat.with_structured_output(Capital, method=method)
    assert structured.invoke("What is the capital of France? Answer in JSON.") == Capital(capital="Paris")


def test_completions(base_url: str) -> None:
    from langchain_openai import OpenAI

    text = OpenAI(
        model="demo", base_url=base_url, api_key=SecretStr("none"), temperature=0, max_tokens=4, max_retries=0
    )
    assert "".join(text.stream("Hello")) == text.invoke("Hello")


def test_an_agent_loop(chat: Any) -> None:
    """The model chooses a tool, the loop runs it, the model answers with its result."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str) -> dict[str, Any]:
        """Get the weather of a city"""
        return {"temperature": 21, "condition": "sunny", "city": city}

    agent = chat.bind_tools([get_weather])
    history: list[Any] = [HumanMessage("What is the weather in Paris?")]
    for _ in range(4):
        message = agent.invoke(history)
        history.append(message)
        if not message.tool_calls:
            break
        history += [get_weather.invoke(call) for call in message.tool_calls]
    assert [type(message).__name__ for message in history] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    assert history[1].tool_calls[0]["args"] == {"city": "Paris"}
    assert "sunny" in history[-1].content and "21" in history[-1].content


def test_a_streamed_call(chat: Any) -> None:
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        return city

    whole = None
    for chunk in chat.bind_tools([get_weather], tool_choice="get_weather").stream("What is the weather in Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and [(c["name"], c["args"]) for c in whole.tool_calls] == [
        ("get_weather", {"city": "Rome"})
    ]


def test_embeddings_and_a_store_of_them(base_url: str) -> None:
    """As in everybody's first retrieval."""
    from langchain_core.vectorstores import InMemoryVectorStore
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model="demo", base_url=base_url, api_key=SecretStr("none"), check_embedding_ctx_length=False
    )
    texts = ["What is 12 + 30?", "A cat sleeps.", "The answer is 42."]
    vectors = embeddings.embed_documents(texts)
    assert len(vectors) == 3 and vectors[1] == pytest.approx(embeddings.embed_query(texts[1]), abs=1e-4)
    store = InMemoryVectorStore.from_texts(texts, embeddings)
    assert [found.page_content for found in store.similarity_search(texts[2], k=1)] == [texts[2]]
