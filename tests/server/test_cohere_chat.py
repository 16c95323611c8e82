"""POST /v2/chat: what becomes of a request, whole and streamed answers, and Cohere's own client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import cohere
import pytest

from vserve.server.dialects.cohere.request import CohereChatRequest

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}}
SAID = '<think>Hm.</think>See:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def ask(client: Any, **body: Any) -> Any:
    return client.post("/v2/chat", {"messages": HI, **body})


def stream(client: Any, **body: Any) -> list[dict[str, Any]]:
    answer = ask(client, stream=True, **body)
    assert answer.status_code == 200, answer.text
    *parts, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for part in parts:
        name, data = re.fullmatch(r"event: (\S+)\ndata: (.+)", part).groups()  # type: ignore[union-attr]
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


def test_an_answer(thinking: Any) -> None:
    thinking.says("Hello world!")
    answer = ask(thinking.client, max_tokens=50, k=5, p=0.5, temperature=0.5, seed=1, stop_sequences=["!"]).json()
    assert answer["message"] == {"role": "assistant", "content": [{"type": "text", "text": "Hello world"}]}
    assert answer["finish_reason"] == "STOP_SEQUENCE" and answer.keys() == {"id", "finish_reason", "message", "usage"}
    sampling = thinking.engine.submitted[-1].sampling
    assert (sampling.top_k, sampling.top_p, sampling.max_tokens, sampling.seed) == (5, 0.5, 50, 1)
    assert answer["usage"]["tokens"] == answer["usage"]["billed_units"]
    assert ask(thinking.client).json()["finish_reason"] == "COMPLETE"
    assert ask(thinking.client, max_tokens=1).json()["finish_reason"] == "MAX_TOKENS"
    scored = ask(thinking.client, logprobs=True).json()
    assert "".join(entry["text"] for entry in scored["logprobs"]).startswith("Hello world!")
    assert all(len(entry["token_ids"]) == len(entry["logprobs"]) == 1 for entry in scored["logprobs"])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_adds_up_to_the_whole(thinking: Any, size: int) -> None:
    thinking.says(SAID, size)
    whole = ask(thinking.client, tools=[TOOL], logprobs=True).json()
    assert whole["finish_reason"] == "TOOL_CALL"
    assert whole["message"]["content"] == [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "See:"}]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    events = stream(thinking.client, tools=[TOOL], logprobs=True)
    assert events[0]["type"] == "message-start" and events[-1]["type"] == "message-end"
    assert events[-1]["delta"] == {"finish_reason": "TOOL_CALL", "usage": whole["usage"]}
    blocks: list[Any] = []
    arguments, opened = "", ""
    for event in events[1:-1]:
        kind, said = event["type"], event.get("delta", {}).get("message", {})
        if kind == "content-start":
            assert not opened and event["index"] == len(blocks)
            blocks.append(said["content"])
        elif kind == "content-delta":
            ((name, text),) = said["content"].items()
            blocks[-1][name] += text
        elif kind == "tool-call-start":
            assert not opened and event["index"] == 0 and said["tool_calls"]["function"]["name"] == "get_weather"
        elif kind == "tool-call-delta":
            arguments += said["tool_calls"]["function"]["arguments"]
        opened = "" if kind.endswith("-end") else kind.rpartition("-")[0]
    assert blocks == whole["message"]["content"] and arguments == call["function"]["arguments"]
    assert any("logprobs" in event for event in events)


def test_a_conversation_with_calls_is_the_chat_s(thinking: Any) -> None:
    """Rendered as /v1/chat/completions renders the same."""
    thinking.says("Sun.")
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    data = {"data": {"title": "a", "snippet": "b"}, "id": "d1"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "tool_plan": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "document", "document": {"data": "sun"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Sun."}]},
        {"role": "user", "content": "And now?"},
    ]
    assert ask(thinking.client, messages=messages, tools=[TOOL]).status_code == 200
    prompt = thinking.prompt
    chat = [
        messages[0], {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
        {"role": "assistant", "reasoning": "Hm.", "content": "Sun."}, messages[-1],
    ]  # fmt: skip
    assert thinking.client.post("/v1/chat/completions", {"messages": chat, "tools": [TOOL]}).status_code == 200
    assert prompt == thinking.prompt and "sun" in prompt and "I look." in prompt
    messages[3]["content"] = [{"type": "document", "document": data}]
    assert ask(thinking.client, messages=messages, tools=[TOOL]).status_code == 200
    assert '{"id":"d1","title":"a","snippet":"b"}' in thinking.prompt
    messages[3]["content"] = [{"type": "document", "document": {"data": {"text": 5}}}]
    assert ask(thinking.client, messages=messages, tools=[TOOL]).status_code == 200
    assert '{"text":5}' in thinking.prompt


def test_zero_samples_from_all_whatever_the_model_s_default_is() -> None:
    tops = [
        CohereChatRequest.model_validate({"messages": HI, **given}).chat().top_p for given in ({"p": 0}, {}, {"p": 0.5})
    ]
    assert tops == [1.0, None, 0.5]


def test_what_is_not_here_is_named(thinking: Any) -> None:
    thinking.says("Hi.")
    documents = ["a", {"data": {"text": "b"}}]
    answer = ask(thinking.client, citation_options={"mode": "FAST"}, safety_mode="STRICT", documents=documents)
    assert answer.status_code == 200
    assert answer.headers["x-vserve-ignored-params"] == "citation_options, safety_mode"
    quiet = ask(thinking.client, citation_options={"mode": "OFF"}, safety_mode="NONE")
    assert "x-vserve-ignored-params" not in quiet.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"tool_choice": "x", "tools": [TOOL]}, "tool_choice"),
        ({"p": 2}, "p"),
        ({"k": -2}, "k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"documents": [7]}, "documents[0]"),
        ({"documents": "x"}, "documents"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"raw_prompting": True}, "raw_prompting"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_errors(thinking: Any, body: dict[str, Any], param: str) -> None:
    answer = ask(thinking.client, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_structure_and_thought(thinking: Any) -> None:
    thinking.says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert ask(thinking.client, response_format={"type": "json_object", "json_schema": schema}).status_code == 200
    assert ask(thinking.client, tools=[TOOL], tool_choice="REQUIRED", strict_tools=True).status_code == 200
    assert len(thinking.grammars.asked) >= 2
    off = ask(thinking.client, thinking={"type": "disabled"})
    assert [part["type"] for part in off.json()["message"]["content"]] == ["text"]


def test_cohere_s_own_client_drives_it(serve: Any) -> None:
    def talk(port: int) -> None:
        client = cohere.ClientV2(api_key="none", base_url=f"http://127.0.0.1:{port}")
        answer = client.chat(model="test", messages=[{"role": "user", "content": "Hi"}])
        assert answer.message.content is not None and answer.message.content[0].text == "Hello world!"
        assert answer.finish_reason == "COMPLETE" and answer.usage.tokens.output_tokens == 4
        text, kinds = "", []
        for event in client.chat_stream(model="test", messages=[{"role": "user", "content": "Hi"}]):
            kinds.append(event.type)
            if event.type == "content-delta":
                text += event.delta.message.content.text
        assert text == "Hello world!" and (kinds[0], kinds[-1]) == ("message-start", "message-end")
        with pytest.raises(cohere.BadRequestError):
            client.chat(model="test", messages=[])

    serve(lambda port: asyncio.to_thread(talk, port))
