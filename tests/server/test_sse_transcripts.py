"""Streams, byte by byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

REQUEST_ID = {"x-request-id": "abc"}


def stream(client: Any, path: str, **body: Any) -> Any:
    response = client.post(path, {"stream": True, **body}, headers=REQUEST_ID)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return response.content


def chat(client: Any, **body: Any) -> bytes:
    return stream(client, "/v1/chat/completions", **{"messages": [{"role": "user", "content": "Hi"}], **body})


def complete(client: Any, **body: Any) -> bytes:
    return stream(client, "/v1/completions", **{"prompt": "Hello", **body})


def payloads(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each event; checks that nothing else is on the wire."""
    assert raw.endswith(b"data: [DONE]\n\n") and b"\r" not in raw
    events = raw.decode().split("\n\n")[:-2]
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events]


def expected_chat(created: int, *choices: str, tail: str = "") -> bytes:
    head = (
        f'data: {{"id":"chatcmpl-abc","object":"chat.completion.chunk","created":{created},"model":"test","choices":['
    )
    return "".join(f"{head}{choice}]{tail}}}\n\n" for choice in choices).encode()


def test_chat_is_exact(client: Any) -> None:
    raw = chat(client)
    created = payloads(raw)[0]["created"]
    assert raw == (
        expected_chat(
            created,
            '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
            '{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":null}',
            '{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null}',
            '{"index":0,"delta":{"content":"!"},"logprobs":null,"finish_reason":null}',
            '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}',
        )
        + b"data: [DONE]\n\n"
    )


def test_chat_with_usage_is_exact(client: Any) -> None:
    raw = chat(client, stream_options={"include_usage": True}, max_tokens=2)
    created = payloads(raw)[0]["created"]
    num_prompt = payloads(raw)[-1]["usage"]["prompt_tokens"]
    usage = (
        f'{{"prompt_tokens":{num_prompt},"total_tokens":{num_prompt + 2},"completion_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":0}}'
    )
    assert raw == (
        expected_chat(
            created,
            '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
            '{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":null}',
            '{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null}',
            '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}',
            tail=',"usage":null',
        )
        + expected_chat(created, "", tail=f',"usage":{usage}')
        + b"data: [DONE]\n\n"
    )


def test_completion_is_exact(client: Any) -> None:
    raw = complete(client, max_tokens=2)
    created = payloads(raw)[0]["created"]
    head = f'data: {{"id":"cmpl-abc","object":"text_completion","created":{created},"model":"test","choices":['
    assert raw.decode() == (
        head
        + '{"index":0,"text":"Hello","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + head
        + '{"index":0,"text":" world","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + head
        + '{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        + "data: [DONE]\n\n"
    )


def test_every_choice_opens_once_and_finishes_once(client: Any) -> None:
    chunks = [event["choices"][0] for event in payloads(chat(client, n=3, temperature=1.0))]
    for index in range(3):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [chunk["delta"].get("role") for chunk in own] == ["assistant", None, None, None, None]
        assert "".join(chunk["delta"].get("content", "") for chunk in own) == "Hello world!"
        assert [chunk["finish_reason"] for chunk in own] == [None] * 4 + ["stop"]
    assert [chunk["index"] for chunk in chunks[:3]] == [0, 1, 2]  # the roles come first


def test_prompts_and_choices_have_their_indexes(client: Any, engine: Any, text_model: Any) -> None:
    """Index = prompt · n + choice, and each prompt's text goes to its own choices."""
    engine.script = lambda request: [[token] for token in [*request.token_ids, 2]]  # an echo
    chunks = [event["choices"][0] for event in payloads(complete(client, prompt=["Hello", "world"], n=2))]
    texts = ["".join(chunk["text"] for chunk in chunks if chunk["index"] == index) for index in range(4)]
    assert texts == ["Hello", "Hello", "world", "world"]


@pytest.mark.parametrize("delay", [0.0, -1.0])  # a token an event, and all of them piled up in one
def test_stop_string_across_chunks(client: Any, engine: Any, say: Any, delay: float) -> None:
    engine.script, engine.delay = say("one two three four"), delay
    events = payloads(chat(client, stop=["two th", "never"]))
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "one "
    assert events[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "two th",
    }  # fmt: skip
    assert all("t" not in event["choices"][0]["delta"].get("content", "") for event in events)
    assert len(engine.aborted) == (1 if delay == 0 else 0)  # where it had finished already there is nothing to abort


def test_multi_byte_characters_come_whole(client: Any, engine: Any, say: Any) -> None:
    engine.script = say("naïve 你好 👩‍🚀!")
    contents = [event["choices"][0]["delta"].get("content", "") for event in payloads(chat(client))]
    assert "".join(contents) == "naïve 你好 👩‍🚀!"
    assert not any("\ufffd" in content for content in contents)


def test_half_a_character_at_the_end_is_marked(client: Any, engine: Any, text_model: Any) -> None:
    half = text_model.tokenizer.encode("你", False)[:-1]
    engine.script = lambda request: [[token] for token in [*half, 2]]
    assert client.chat().json()["choices"][0]["message"]["content"] == "\ufffd"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in payloads(chat(client))) == "\ufffd"


def test_no_text_at_all(client: Any, engine: Any) -> None:
    engine.script = lambda request: [[2]]
    events = [event["choices"][0] for event in payloads(chat(client))]
    assert [event["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]
    assert events[-1]["finish_reason"] == "stop"


def test_token_ids_and_logprobs_ride_along(client: Any, engine: Any, text_model: Any) -> None:
    ids = text_model.tokenizer.encode("Hello world!", False)
    events = payloads(chat(client, return_token_ids=True, logprobs=True, top_logprobs=2))
    assert events[0]["prompt_token_ids"] == engine.submitted[0].token_ids
    choices = [event["choices"][0] for event in events[1:-1]]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in [*ids, 2]]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == ["Hello", " world", "!", "<|im_end|>"]
    assert bytes(entries[1]["bytes"]) == b" world"
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4

    events = payloads(complete(client, return_token_ids=True, logprobs=1))
    assert events[0]["choices"][0]["prompt_token_ids"] == text_model.tokenizer.encode("Hello", True)
    parts = [event["choices"][0]["logprobs"] for event in events[1:-1]]
    assert [part["text_offset"] for part in parts] == [[0], [5], [11], [12]]
    assert [part["tokens"] for part in parts] == [["Hello"], [" world"], ["!"], ["<|im_end|>"]]


def test_engine_dies_mid_stream(client: Any, engine: Any) -> None:
    engine.die_after = 2
    raw = chat(client)
    assert raw.endswith(
        b'data: {"error":{"message":"The engine died: out of luck","type":"service_unavailable_error","param":null,'
        b'"code":"engine_dead"}}\n\ndata: [DONE]\n\n'
    )


def test_error_of_one_choice_ends_the_stream_and_aborts_the_others(client: Any, engine: Any, say: Any) -> None:
    good = say("Hello world, hello world, hello world, hello world")
    engine.script = lambda request: good(request) if request.id else [[50]]
    engine.fail_with = "NaN logits"
    events = payloads(chat(client, n=3, temperature=1.0))
    assert events[-1]["error"]["message"] == "The engine failed on this request: NaN logits."
    assert sorted(engine.aborted) == [1, 2] and engine.num_open == 0


def test_a_broken_detokenizer_ends_only_its_stream(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vserve.server.text.detokenizer import Detokenizer

    real, calls = Detokenizer.feed, []

    def feed(self: Detokenizer, token: int) -> str:
        calls.append(token)
        if len(calls) == 2:
            raise RuntimeError("injected")
        return real(self, token)

    monkeypatch.setattr(Detokenizer, "feed", feed)
    error = payloads(chat(client))[-1]["error"]
    assert error["type"] == "server_error" and "injected" not in error["message"] and "abc" in error["message"]
    assert payloads(chat(client))[-1]["choices"][0]["finish_reason"] == "stop"


def test_streamed_equals_not_streamed(client: Any, engine: Any, say: Any) -> None:
    engine.script = say("The answer is 42. Say it again — 你好 — STOP now.")
    for extra in ({}, {"stop": "STOP"}, {"stop": ["42", "answer"], "min_tokens": 8}, {"max_tokens": 5},
                  {"stop": ["is"], "include_stop_str_in_output": True}):  # fmt: skip
        whole = client.chat(**extra).json()["choices"][0]
        events = [event["choices"][0] for event in payloads(chat(client, **extra))]
        assert "".join(event["delta"].get("content", "") for event in events) == whole["message"]["content"]
        assert events[-1]["finish_reason"] == whole["finish_reason"]
        assert events[-1]["stop_reason"] == whole["stop_reason"]
