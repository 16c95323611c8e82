"""Every rule for requests: what breaks one is a 400 with one short sentence and the field's name, never a 422."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from vserve.server.app import create_app
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel

from .conftest import Client, ScriptedEngine, script_of

USER = {"role": "user", "content": "Hi"}

# (body, param) for both endpoints
SHARED: list[tuple[dict[str, Any], str]] = [
    *[({"n": value}, "n") for value in (0, -1, 10**9, 2**63, "3", 1.5, True)],
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, 2**31, 10**12, "5", 1.5, True)],
    *[({"temperature": value}, "temperature") for value in (-1, 3, "0", True, [])],
    *[({"top_p": value}, "top_p") for value in (0, -0.1, 1.1, "1")],
    *[({"top_k": value}, "top_k") for value in (-2, 2**40, 1.5)],
    *[({"min_p": value}, "min_p") for value in (-0.1, 1.1)],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1)],
    *[({name: value}, name) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, "1")],
    *[({"seed": value}, "seed") for value in (2**63, -(2**63) - 1, 1.5, "1")],
    *[({"min_tokens": value}, "min_tokens") for value in (-1, 1.5, 10**6)],
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    *[({"stop": value}, "stop") for value in ("", [""], [None], 7, ["a", 7], ["x"] * 10**5, "x" * 10**6)],
    *[({"stop_token_ids": value}, "stop_token_ids") for value in ([-1], [320], [2**63], [True], 5, [0] * 10**5)],
    *[({"logit_bias": value}, "logit_bias") for value in ([], {"-1": 1}, {"320": 1}, {"x": 1}, {"1": "2"}, {"1": True},
                                                         {str(2**63): 1}, {str(i): 1 for i in range(10**4)})],
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"more": True}}, "stream_options.more"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 10**6}, "cache_salt"),
    ({"user": "x" * 10**6}, "user"),
    ({"model": 5}, "model"),
    ({"ignore_eos": "true"}, "ignore_eos"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 10**9}, "best_of"),
    ({"n": 2, "temperature": 1, "best_of": 1}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"echo": "yes"}, "echo"),
    *[({"prompt_logprobs": value}, "prompt_logprobs") for value in (-1, 21, 10**6, True, "1")],
    *[({"allowed_token_ids": value}, "allowed_token_ids") for value in ([], [-1], [320], [2**63], [True], 5)],
    ({"allowed_token_ids": [0, 2], "min_tokens": 1}, "allowed_token_ids"),  # only what ends, and it must not
    *[({"bad_words": value}, "bad_words") for value in ("a", [""], [None], ["a"] * 1000, ["x" * 10**6])],
    *[({"truncate_prompt_tokens": value}, "truncate_prompt_tokens") for value in (0, -2, 129, 1.5, "5")],
    ({"truncate_prompt_tokens": -1, "max_tokens": 128}, "truncate_prompt_tokens"),
    *[({"truncation_side": value}, "truncation_side") for value in ("middle", "", 1)],
    *[({"logprob_token_ids": value}, "logprob_token_ids") for value in ("a", [-1], [320], [True], [1] * 21)],
    ({"logprob_token_ids": [5], "echo": True}, "logprob_token_ids"),
    ({"logits_processors": ["some.code"]}, "logits_processors"),
    *[({"repetition_detection": value}, "repetition_detection") for value in (5, [], "x")],
    ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection.min_count"),
    ({"repetition_detection": {"max_pattern_size": 10**6, "min_count": 2}}, "repetition_detection.max_pattern_size"),
    ({"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
     "repetition_detection.min_pattern_size"),
    ({"repetition_detection": {"patterns": 1}}, "repetition_detection.patterns"),
    *[({"request_id": value}, "request_id") for value in ("", "x" * 10**6, 5)],
    ({"stream": True, "stream_options": {"continuous_usage_stats": "yes"}}, "stream_options.continuous_usage_stats"),
    *[({name: "yes"}, name) for name in ("skip_special_tokens", "spaces_between_special_tokens", "return_token_ids",
                                         "return_tokens_as_token_ids")],
    *[({"response_format": value}, "response_format") for value in (5, "json_object", [])],
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    *[({"structured_outputs": value}, "structured_outputs") for value in (
        5, {}, {"disable_any_whitespace": True}, {"regex": "a", "choice": ["a"]}, {"json_object": False})],
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": 5}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": "no"}},
     "structured_outputs.disable_any_whitespace"),
    *[({"structured_outputs": {"choice": value}}, "structured_outputs.choice") for value in ([], "a", [""], [1])],
    *[({"structured_outputs": {"regex": value}}, "structured_outputs.regex") for value in ("", 5, ["a"])],
    *[({"structured_outputs": {"json": value}}, "structured_outputs.json") for value in ("{", "5", [], True)],
    ({"structured_outputs": {"json": '{"a":' * 10**5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "guided_whitespace_pattern": 5}, "guided_whitespace_pattern"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
]  # fmt: skip

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [USER, {"content": "Hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}] * 10**5}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "tool", "content": "Hi", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": "Hi", "reasoning": 5}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10**4}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "messages[0].content[0].type"),
    ({"documents": {}}, "documents"),
    ({"documents": ["text"]}, "documents"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "Hi", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "name": "nobody", "content": "Hi"}]}, "messages"),  # the template raises
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**4}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    *[({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, 10**6)],
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
]

COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *[({"prompt": value}, "prompt") for value in (
        None, "", [], [[]], [""], [-1], [320], [2**63], [[1], [320]], ["a", 1], [1, "a"], [["a"]], [[True]], [None], 5,
        {}, ["a"] * 2000, [[[1]]],
    )],
    *[({"logprobs": value}, "logprobs") for value in (-1, 21, True)],
    ({"suffix": "x"}, "suffix"),
    ({"prompt": [[1]] * 1000, "n": 100}, "n"),
]  # fmt: skip


def check(response: Any, param: str) -> dict[str, Any]:
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["message"].endswith(".") and len(error["message"]) < 300 and "\n" not in error["message"]
    assert "pydantic" not in error["message"]
    return error


@pytest.fixture(scope="module")
def refusing(text_model: TextModel) -> Iterator[tuple[Client, ScriptedEngine]]:
    """One server for all that comes no further than its checks."""
    engine = ScriptedEngine(script_of(text_model, "Hello world!"))
    client = Client(create_app(engine, ServerConfig(), text_model))
    yield client, engine
    client.close()


def check_refused(server: tuple[Client, ScriptedEngine], path: str, body: dict[str, Any], param: str) -> None:
    client, engine = server
    engine.submitted.clear()
    check(client.post(path, body), param)
    assert not engine.submitted


@pytest.mark.parametrize("body, param", SHARED + CHAT, ids=lambda value: str(value)[:40])
def test_chat(refusing: tuple[Client, ScriptedEngine], body: dict[str, Any], param: str) -> None:
    check_refused(refusing, "/v1/chat/completions", {"messages": [USER], **body}, param)


@pytest.mark.parametrize("body, param", SHARED + COMPLETIONS, ids=lambda value: str(value)[:40])
def test_completions(refusing: tuple[Client, ScriptedEngine], body: dict[str, Any], param: str) -> None:
    check_refused(refusing, "/v1/completions", {"prompt": "Hello", **body}, param)


def test_missing_fields(client: Any) -> None:
    assert check(client.post("/v1/chat/completions", {}), "messages")["code"] == "missing_required_parameter"
    assert check(client.post("/v1/completions", {}), "prompt")["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}', b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"a","n":' + b"9" * 10**6 + b"}", b'{"prompt":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    ],
    ids=lambda body: str(body[:30]),
)  # fmt: skip
def test_broken_json(client: Any, body: bytes) -> None:
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] is None


def test_content_types(client: Any, new_client: Any) -> None:
    body = json.dumps({"prompt": "Hello"}).encode()
    for bad in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = client.post("/v1/completions", content=body, headers={"content-type": bad})
        assert response.status_code == 415 and response.json()["error"]["type"] == "invalid_request_error"
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize", "/abort_request"):
        # A page of any origin may send this before anybody is asked.
        foreign = {"origin": "https://bad.example"}
        assert client.post(path, content=body, headers=foreign).status_code == 403
        response = new_client(allowed_origins='["*"]').post(path, content=body, headers=foreign)
        assert response.status_code == 415 and "'Content-Type: application/json'" in response.text
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert client.post("/v1/completions", content=body, headers=headers).status_code == 415
    response = client.post("/v1/completions", content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert response.status_code == 200


def test_null_is_the_same_as_absent(client: Any, engine: Any) -> None:
    names = ("n", "max_tokens", "temperature", "top_p", "stop", "seed", "logit_bias", "stream", "stream_options",
             "user", "tools", "tool_choice", "response_format", "best_of", "echo", "stop_token_ids",
             "logprobs")  # fmt: skip
    assert client.complete(**dict.fromkeys(names)).status_code == 200
    assert client.chat(**dict.fromkeys(names)).status_code == 200
    assert client.complete().status_code == 200
    assert engine.submitted[0].sampling == engine.submitted[2].sampling


def test_values_that_ask_for_nothing_are_fine(client: Any) -> None:
    response = client.complete(
        best_of=1, echo=False, suffix="", use_beam_search=False, response_format={"type": "text"}, tool_choice="none",
        length_penalty=1.0, early_stopping=False, guided_json=None, guided_decoding_backend="outlines", bad_words=[],
        repetition_detection={"max_pattern_size": 0}, guided_json_object=False,
    )  # fmt: skip
    assert response.status_code == 200 and "x-vserve-ignored-params" not in response.headers
    assert client.complete(n=2, temperature=1, best_of=2).status_code == 200


def test_code_that_a_request_names_is_refused_with_what_there_is_instead(client: Any) -> None:
    assert client.chat(logits_processors=[]).status_code == 200
    said = client.chat(logits_processors=["some.code"]).json()["error"]
    assert said["code"] == "unsupported_parameter" and "whatever --logits-processor-pattern allows" in said["message"]
    assert "'logit_bias', 'allowed_token_ids', 'bad_words' and 'structured_outputs'" in said["message"]


def test_strict_params(engine: Any, text_model: Any, new_client: Any) -> None:
    client = new_client(strict_params=True)
    error = check(client.chat(labels={}, verbose=True), "labels")
    assert error["message"] == "Unknown parameter: 'labels'." and error["code"] == "unknown_parameter"
    check(client.complete(**{"evil\r\nx-header: 1": 1}), "evil x-header: 1")
    assert client.complete(max_tokens=1, priority=0).status_code == 200
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
        ("completions", {"prompt": "Hi"}), ("responses", {"input": "Hi"}),
    ):  # fmt: skip
        found = client.post(f"/v1/{path}/render", body | {"return_token_offsets": True})
        assert found.status_code == 200, f"a field of /v1/{path}/render: {found.text}"


def test_unknown_fields_are_named(client: Any) -> None:
    response = client.chat(labels={"a": 1}, verbose=True, **{"evil\r\nx-header: 1": 1, "x" * 1000: 1})
    assert response.status_code == 200
    names = response.headers["x-vserve-ignored-params"].split(", ")
    assert names[:2] == ["labels", "verbose"] and len(names) == 4 and "x-header" not in response.headers
    streamed = client.chat(stream=True, labels={})
    assert streamed.headers["x-vserve-ignored-params"] == "labels"


def test_context_length(client: Any, engine: Any) -> None:
    limit = engine.info.max_model_len
    error = check(client.complete(prompt=[5] * 100, max_tokens=29), "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        f"This model's maximum context length is {limit} tokens. However, you requested 29 output tokens and your "
        "prompt contains 100 input tokens, for a total of 129 tokens. Please reduce the length of the input prompt or "
        "the number of requested output tokens."
    )
    assert client.complete(prompt=[5] * 100, max_tokens=28).status_code == 200
    error = check(client.complete(prompt=[5] * limit), "prompt")
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {limit} tokens. However, your prompt")
    error = check(client.post("/v1/chat/completions", {"messages": [{**USER, "content": "é" * 200}]}), "messages")
    assert error["code"] == "context_length_exceeded"


def test_max_tokens_that_nobody_set(client: Any, engine: Any) -> None:
    client.complete()
    client.complete(prompt=[5] * 120)
    client.chat()
    client.chat(max_tokens=5, max_completion_tokens=7)
    completion, capped, chat, both = (request.sampling.max_tokens for request in engine.submitted)
    limit = engine.info.max_model_len
    assert (completion, capped, both) == (16, 8, 7)
    assert chat == limit - len(engine.submitted[2].token_ids)


def test_what_the_engine_gets(client: Any, engine: Any) -> None:
    engine.info = type(engine.info)(**{**{f: getattr(engine.info, f) for f in engine.info.__struct_fields__},
                                       "scheduling_policy": "priority"})  # fmt: skip
    response = client.complete(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, priority=-3,
        frequency_penalty=0.3, seed=2**63 - 1, n=2, logit_bias={"5": 200, "6": -3}, stop_token_ids=[7], min_tokens=2,
        ignore_eos=True, logprobs=3, cache_salt="tenant",
    )  # fmt: skip
    assert response.status_code == 200, response.text
    first, second = engine.submitted
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert sampling.logit_bias == {5: 100.0, 6: -3.0} and sampling.stop_token_ids == (7,)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.logprobs) == (2, True, 3)
    assert sampling.eos_token_ids == (2, 0)
    assert (sampling.seed, second.sampling.seed) == (2**63 - 1, 0)  # seed + i, kept in its range
    assert (first.priority, first.cache_salt) == (-3, "tenant")
    assert client.complete(seed=-(2**63), n=3, temperature=0).status_code == 200
    assert [request.sampling.seed for request in engine.submitted[-3:]] == [-(2**63), 1, 2]


def test_defaults_come_from_the_model(client: Any, engine: Any) -> None:
    client.chat()
    client.chat(temperature=1, top_k=0)
    client.chat(temperature=0.001, top_k=10**6)
    client.chat(temperature=0)
    assert [(r.sampling.temperature, r.sampling.top_k) for r in engine.submitted] == [
        (0.7, 20), (1.0, 0), (0.01, 0), (0.0, 20),
    ]  # fmt: skip
