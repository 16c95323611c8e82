"""Token ids in, token ids out, and the way there and back: render, generate, derender are one chat."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import Any

import pytest

from vserve.server.api import derender

HI = [{"role": "user", "content": "Hi"}]
GENERATE = "/inference/v1/generate"


def events(answer: Any) -> list[Any]:
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_ids_go_in_and_come_out(client: Any, engine: Any, text_model: Any) -> None:
    said = [*text_model.tokenizer.encode("Hello world!", False), 2]
    body = {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "logprobs": 2, "n": 2, "output_kind": 2}}
    answer = client.post(GENERATE, body)
    assert answer.status_code == 200 and "x-vserve-ignored-params" not in answer.headers
    found = answer.json()
    assert [request.token_ids for request in engine.submitted] == [[5, 6, 7]] * 2
    assert engine.submitted[0].sampling.max_tokens == 125, "what is left of the context"
    assert [choice["token_ids"] for choice in found["choices"]] == [said] * 2 and "text" not in found["choices"][0]
    assert found["choices"][0]["finish_reason"] == "stop" and found["usage"]["completion_tokens"] == 2 * len(said)
    first = found["choices"][0]["logprobs"]["content"][0]
    assert (first["token_id"], first["token"], first["logprob"], first["rank"]) == (
        said[0],
        f"token_id:{said[0]}",
        -0.5,
        1,
    )
    assert [one["token_id"] for one in first["top_logprobs"]] == [said[0], 10]
    text = client.post(GENERATE, body | {"output_mode": "text", "return_token_ids": True}).json()
    assert text["choices"][0]["text"] == "Hello world!" and text["prompt_token_ids"] == [5, 6, 7]
    assert text["choices"][0]["logprobs"]["content"][0]["token"] == "Hello"


def test_named_tokens_go_all_the_way(client: Any, engine: Any) -> None:
    """Past the likeliest ones, rendered, and asked for in token ids; without a rank, which nobody has counted."""
    body = {"messages": HI, "logprobs": True, "top_logprobs": 1, "logprob_token_ids": [7, 9], "max_tokens": 2}
    entries = client.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    rendered = client.post("/v1/chat/completions/render", body).json()
    assert rendered["sampling_params"]["logprob_token_ids"] == [7, 9]
    said = client.post(GENERATE, rendered).json()["choices"][0]["logprobs"]["content"]
    assert [[one["rank"] for one in entry["top_logprobs"]] for entry in said] == [[None, None]] * 2
    for request in engine.submitted:
        assert (request.sampling.logprobs, request.sampling.logprob_token_ids) == (2, (7, 9))
    assert (
        "logprob_token_ids"
        not in client.post("/v1/chat/completions/render", {"messages": HI}).json()["sampling_params"]
    )


def test_a_stream_of_ids_is_the_whole(client: Any) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"seed": 1}, "return_token_ids": True}
    whole = client.post(GENERATE, body).json()
    told = events(client.post(GENERATE, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert told[0]["prompt_token_ids"] == [5, 6, 7] and "prompt_token_ids" not in told[1]
    choices = [choice for chunk in told for choice in chunk["choices"]]
    assert [id for choice in choices for id in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": ["a"], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [5]}, "sampling_params"),
        ({"token_ids": [320], "sampling_params": {}}, "prompt"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"prompt": "a"}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {}, "features": {}}, "features"),
        ({"token_ids": [5] * 200, "sampling_params": {}}, "prompt"),
    ],
)
def test_what_cannot_be_asked(client: Any, engine: Any, body: Any, param: str) -> None:
    answer = client.post(GENERATE, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param and not engine.submitted


def test_a_chat_in_three_steps_is_the_chat(thinking: Any) -> None:
    """Rendered, generated, derendered, as three servers may do it: the same message, its reasoning and its calls."""
    thinking.says('<think>Hm.</think>See:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    client = thinking.client
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HI, "tools": tools, "logprobs": True, "top_logprobs": 1, "temperature": 0}
    direct = client.post("/v1/chat/completions", body).json()["choices"][0]
    rendered = client.post("/v1/chat/completions/render", body).json()
    generated = client.post(GENERATE, rendered)
    assert generated.status_code == 200 and "x-vserve-ignored-params" not in generated.headers
    back = {"generate_response": generated.json(), "chat_request": body, "prompt_token_ids": rendered["token_ids"],
            "prompt_tokens": len(rendered["token_ids"])}  # fmt: skip
    answer = client.post("/v1/chat/completions/derender", back)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    (call,), (other,) = (one["message"].pop("tool_calls") for one in (choice, direct))
    assert call["function"] == other["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["message"] == direct["message"] and choice["message"]["reasoning"] == "Hm."
    assert choice["logprobs"] == direct["logprobs"] and choice["finish_reason"] == "tool_calls"
    assert answer.json()["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    plain = client.post("/v1/chat/completions/derender", {"generate_response": generated.json()}).json()
    assert plain["choices"][0]["message"]["content"].startswith("<think>Hm.</think>See:"), "nobody has said what it was"


def test_completions_in_three_steps(client: Any) -> None:
    body = {"prompt": ["a", "b"], "logprobs": 1, "seed": 1, "max_tokens": 3}
    direct = client.post("/v1/completions", body).json()
    rendered = client.post("/v1/completions/render", body).json()
    generated = [client.post(GENERATE, one).json() for one in rendered]
    back = {"generate_responses": generated, "completion_request": body, "prompt_tokens": [4, 5]}
    answer = client.post("/v1/completions/derender", back).json()
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in direct["choices"]]
    assert [choice["logprobs"] for choice in answer["choices"]] == [one["logprobs"] for one in direct["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1] and answer["usage"]["prompt_tokens"] == 9


def derendered(client: Any, path: str, given: list[Any], **more: Any) -> list[Any]:
    """The chunk of each event of a stream, asked for one by one."""
    states: dict[int, Any] = {}
    chunks = []
    for event in given:
        index = event["choices"][0]["index"] if event["choices"] else -1
        body = {"stream": True, "generate_chunk": event, "stream_state": states.get(index), **more}
        answer = client.post(path, body)
        assert answer.status_code == 200, answer.text
        states[index] = answer.json()["stream_state"]
        chunks.append(answer.json()["chunk"])
    return chunks


def test_a_streamed_chat_in_three_steps(thinking: Any) -> None:
    """Event by event, and nothing is remembered between two of them: what they add up to is the whole answer."""
    said = '<think>Hm.</think>Sé:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    thinking.says(said)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HI, "tools": tools, "logprobs": True, "top_logprobs": 1, "temperature": 0, "n": 2}
    direct = thinking.client.post("/v1/chat/completions", body).json()
    rendered = thinking.client.post("/v1/chat/completions/render", body).json()
    told = events(
        thinking.client.post(GENERATE, rendered | {"stream": True, "stream_options": {"include_usage": True}})
    )
    more = {"chat_request": body, "prompt_token_ids": rendered["token_ids"], "prompt_tokens": 7}
    chunks = derendered(thinking.client, "/v1/chat/completions/derender", told, **more)
    assert len(chunks) > 10 and chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] == 7
    assert chunks[-1]["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    for index, whole in enumerate(direct["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        deltas = [part["delta"] for part in parts]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"] == "Sé:"
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["id"] for call in calls if "id" in call] == [calls[0]["id"]], "once"
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == whole["logprobs"]["content"]


def test_a_streamed_completion_in_three_steps(client: Any) -> None:
    body = {"prompt": "a", "logprobs": 1, "seed": 1, "stop": ["wor"]}
    whole = client.post("/v1/completions", body).json()["choices"][0]
    (rendered,) = client.post("/v1/completions/render", body).json()
    told = events(client.post(GENERATE, rendered | {"stream": True}))
    more = {"completion_request": body, "prompt_tokens": 3, "prompt_token_ids": rendered["token_ids"]}
    chunks = derendered(client, "/v1/completions/derender", told, **more)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == "Hello "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "wor")
    said = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [value for one in said for value in one[name]] == values


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"generate_chunk": None}, "generate_chunk"),
        ({"generate_chunk": {"choices": [{"index": 0}, {"index": 1}]}}, None),
        ({"stream_state": {"output_token_ids": [320]}}, "stream_state.output_token_ids"),
        ({"stream_state": {"output_token_ids": [5] * 128}}, "token_ids"),
        ({"stream_state": {"output_token_ids": ["a"]}}, None),
        ({"prompt_tokens": -1}, None),
        ({"prompt_token_ids": [320]}, "prompt_token_ids"),
    ],
)
def test_events_that_cannot_be_derendered(client: Any, more: Any, param: str | None) -> None:
    event = {"choices": [{"index": 0, "token_ids": [5]}]}
    for path in ("chat/completions", "completions"):
        body = {"stream": True, "generate_chunk": event, "stream_state": None, **more}
        answer = client.post(f"/v1/{path}/derender", body)
        assert answer.status_code == 400 and param in (None, answer.json()["error"]["param"]), answer.text
    for listed in ({"prompt_tokens": [1]}, {"prompt_token_ids": [[5]]}):
        body = {"stream": True, "generate_chunk": event, **listed}
        assert client.post("/v1/completions/derender", body).status_code == 400
    flat = {"generate_responses": [event], "prompt_token_ids": [5]}
    assert "a list with an entry for each prompt" in client.post("/v1/completions/derender", flat).text


@pytest.mark.parametrize("value", [-1, "x", [True], ["x"], 2**31])
def test_numbers_of_prompts_are_asked_for_by_name(client: Any, value: Any) -> None:
    given = {"generate_responses": [{"choices": []}]}
    for name in ("prompt_tokens", "prompt_token_ids"):
        answer = client.post("/v1/completions/derender", {**given, name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text


def test_large_answers_are_measured_off_the_event_loop(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    idents: list[int] = []
    for name in ("_num_logprobs", "_work"):

        def watched(*arguments: Any, measure: Any) -> Any:
            idents.append(threading.get_ident())
            return measure(*arguments)

        monkeypatch.setattr(derender, name, partial(watched, measure=getattr(derender, name)))
    entry = {"token_id": 300, "logprob": 0.0, "top_logprobs": [{"token_id": 300, "logprob": 0.0}] * 100}
    given = {"choices": [{"index": 0, "token_ids": [300] * 100, "logprobs": {"content": [entry] * 100}}]}
    for path, body in (
        ("chat/completions", {"generate_response": given}), ("completions", {"generate_responses": [given]})
    ):  # fmt: skip
        idents.clear()
        assert client.post(f"/v1/{path}/derender", body).status_code == 200
        assert idents and threading.get_ident() not in idents


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"choices": [{"index": 0, "token_ids": [320]}]}, "token_ids"),
        ({"choices": [{"index": 0, "token_ids": [5] * 200}]}, "token_ids"),
        ({"choices": [{"index": 0, "token_ids": [5], "logprobs": {"content": [
            {"token_id": 5, "logprob": 0.0, "top_logprobs": [{"token_id": -1, "logprob": 0.0}]}]}}]}, None),
        ({"choices": [{"index": 0, "token_ids": [5, 6], "logprobs": {"content": [
            {"token_id": 5, "logprob": 0.0}]}}]}, "logprobs"),
        ({"choices": [{"index": 0, "token_ids": [5]}], "output_mode": "text"}, None),
        (None, None),
    ],
)  # fmt: skip
def test_what_cannot_be_derendered(client: Any, given: Any, param: str | None) -> None:
    for path, body in (
        ("chat/completions", {"generate_response": given}),
        ("completions", {"generate_responses": [given]}),
    ):
        answer = client.post(f"/v1/{path}/derender", body)
        assert answer.status_code == 400 and param in (None, answer.json()["error"]["param"]), answer.text
    lacking = client.post(
        "/v1/completions/derender", {"generate_responses": [{"choices": []}], "prompt_tokens": [1, 2]}
    )
    assert lacking.status_code == 400 and "2 entries for 1 generate_responses" in lacking.text
    assert client.post("/v1/completions/derender", {"generate_responses": [{"choices": []}]}).json()["choices"] == []


@pytest.mark.parametrize("number", [-1, 2**31, 10**30])
def test_numbers_that_no_answer_can_carry_are_refused(client: Any, number: int) -> None:
    said = {"choices": [{"index": 0, "token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}]}
    ranked = {"choices": [{"index": 0, "token_ids": [5],
                           "logprobs": {"content": [{"token_id": 5, "logprob": -1.0, "rank": number}]}}]}  # fmt: skip
    for path, body in (
        ("/v1/chat/completions/derender", {"generate_response": said, "prompt_tokens": number}),
        ("/v1/chat/completions/derender", {"generate_response": ranked}),
        ("/v1/completions/derender", {"generate_responses": [said], "prompt_tokens": [number]}),
    ):
        assert client.post(path, body).status_code == 400, (path, body)
