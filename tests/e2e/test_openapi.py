"""The OpenAPI document: it describes every field, real answers fit it, and whatever fits it is no server error."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
pytestmark = pytest.mark.slow
INPUTS = ("/v1/embeddings", "/pooling", "/classify")
ANSWERED = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/responses",
    "/v1/messages", "/pooling", "/v2/embed", "/score", "/v2/rerank",
)  # fmt: skip
HI = [{"role": "user", "content": "Hello!"}]
# FastAPI's own pages
HIDDEN = {"/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect", "/ping"}


@pytest.fixture(scope="module")
def server(serve: Any) -> Iterator[Any]:
    """Answers are short, whatever a request asks for: its grammar matters here, not its text."""
    options = ("--override-generation-config", '{"max_new_tokens": 4}', "--trust-request-chat-template")
    with serve(*options, "--no-access-log") as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Any) -> dict[str, Any]:
    return httpx.get(f"{server.url}/openapi.json").json()


def check(document: dict[str, Any], name: str, content: Any) -> None:
    """`content` is what the document calls `name`."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(content)


def schema_of(
    document: dict[str, Any], path: str, method: str, status: str = "200", kind: str = "application/json"
) -> str:
    content = document["paths"][path][method]["responses"][status]["content"][kind]["schema"]
    if kind == "text/event-stream":
        content = content["properties"]["data"]["anyOf"][0]["contentSchema"]["anyOf"][0]
    return content["$ref"].rpartition("/")[2]


def events(text: str) -> list[dict[str, Any]]:
    if text.startswith("event: message-start"):  # Cohere's
        text = text.removesuffix("data: [DONE]\n\n")
    if text.startswith("event: "):  # Responses and Messages too
        *parts, rest = text.split("\n\n")
        assert rest == ""
        return [json.loads(part.partition("\ndata: ")[2]) for part in parts]
    *parts, done, rest = text.split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_every_route_and_every_field(document: dict[str, Any]) -> None:
    from vserve.server.openapi import OPERATIONS

    described = {(operation.path, operation.method) for operation in OPERATIONS}
    routes = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert routes == described, "a route without a description, or a description without a route"
    for path, method in routes:
        operation = document["paths"][path][method]
        assert operation.get("description") or operation.get("summary"), path
        in_path = "{" in path and not path.endswith(
            ("/completions", "/{completion_id}", "/{conversation_id}", "/items")
        )  # what there is to say
        has_body = method == "post" and not in_path and path != "/reload"
        assert ("requestBody" in operation) == has_body, path
        for status, answer in operation["responses"].items():
            assert status == "200" or "content" in answer, (path, status)
    for name, schema in document["components"]["schemas"].items():
        for field, described_field in schema.get("properties", {}).items():
            keys = described_field.keys() - {"title", "default"}
            assert keys, f"{name}.{field} may be anything"
    for name in ("ChatRequest", "CompletionRequest", "EmbeddingRequest", "TokenizeRequest", "DetokenizeRequest"):
        for field, described_field in document["components"]["schemas"][name]["properties"].items():
            assert "description" in described_field or "$ref" in str(described_field), f"{name}.{field}"


LOGPROBS = {"logprobs": True, "top_logprobs": 2}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": LOGPROBS,
    "prompt": {"prompt_logprobs": 1, "return_token_ids": True, "echo": True},
    "several": {"n": 3, "temperature": 1.0, "seed": 5},
    "ids": {**LOGPROBS, "return_tokens_as_token_ids": True, "return_token_ids": True},
    "stop": {"stop": ["ell", "vserve"], "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": list(range(3, 600)), "min_tokens": 1},
    "length": {"max_tokens": 1},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "echo": {"logprobs": 1, "echo": True, "max_tokens": 0},
    "prompts": {"prompt": ["Hello", "What is"], "n": 2, "temperature": 1.0, "echo": True, "logprobs": 0},
    "prompt": {"prompt": [5, 6, 7], "prompt_logprobs": 1, "return_token_ids": True},
}
CALLING = {"name": "f", "description": "d"}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "call": {"tools": [{"type": "function", **CALLING}], "tool_choice": "required", "max_output_tokens": 40},
    "settings": {"reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "instructions": "x", "store": False},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "length": {"max_tokens": 1},
    "stop": {"stop_sequences": ["ell", "vserve"]},
    "call": {"tools": [{**CALLING, "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}},
}
USAGES = [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


@pytest.mark.parametrize("name", CHATS)
def test_chats_fit(server: Any, document: dict[str, Any], name: str) -> None:
    generation_fits(server, document, "/v1/chat/completions", {"messages": HI, **CHATS[name]})


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_fit(server: Any, document: dict[str, Any], name: str) -> None:
    generation_fits(server, document, "/v1/completions", {"prompt": "Hello", **COMPLETIONS[name]})


def generation_fits(server: Any, document: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    check(document, schema_of(document, path, "post"), answer.json())
    for usage in USAGES:
        options = {"stream": True} | ({} if usage is None else {"stream_options": usage})
        answer = httpx.post(f"{server.url}{path}", json={**body, **options}, timeout=240)
        assert answer.status_code == 200, answer.text
        chunks = events(answer.text)
        assert chunks
        for chunk in chunks:
            check(document, schema_of(document, path, "post", kind="text/event-stream"), chunk)


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_fit(server: Any, document: dict[str, Any], name: str) -> None:
    events_and_answer_fit(server, document, "/v1/responses", {"input": "Hello!", **RESPONSES[name]})


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_fit(server: Any, document: dict[str, Any], name: str) -> None:
    events_and_answer_fit(server, document, "/v1/messages", {"messages": HI, "max_tokens": 40, **MESSAGES[name]})


@pytest.mark.parametrize("more", [{"logprobs": True}, {"tools": [{"type": "function", "function": CALLING}]}])
def test_cohere_chats_fit(server: Any, document: dict[str, Any], more: dict[str, Any]) -> None:
    events_and_answer_fit(server, document, "/v2/chat", {"messages": HI, "max_tokens": 40, **more})


def events_and_answer_fit(server: Any, document: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    check(document, schema_of(document, path, "post"), answer.json())
    answer = httpx.post(f"{server.url}{path}", json={**body, "stream": True}, timeout=240)
    assert answer.status_code == 200, answer.text
    for event in events(answer.text):
        check(document, schema_of(document, path, "post", kind="text/event-stream"), event)


def test_stored_responses_fit(server: Any, document: dict[str, Any]) -> None:
    id = httpx.post(f"{server.url}/v1/responses", json={"input": "Hello!"}, timeout=240).json()["id"]
    for method, end in (("get", ""), ("get", "/input_items"), ("post", "/cancel"), ("delete", ""), ("get", "")):
        answer = httpx.request(method, f"{server.url}/v1/responses/{id}{end}")
        route = "/v1/responses/{response_id}" + end
        check(document, schema_of(document, route, method, str(answer.status_code)), answer.json())
    assert answer.status_code == 404


def test_stored_chats_fit(server: Any, document: dict[str, Any]) -> None:
    url = f"{server.url}/v1/chat/completions"
    id = httpx.post(url, json={"messages": HI, "store": True}, timeout=240).json()["id"]
    check(document, schema_of(document, "/v1/chat/completions", "get"), httpx.get(url).json())
    for method, end in (("get", ""), ("get", "/messages"), ("post", ""), ("delete", ""), ("get", "")):
        body = {"metadata": {"a": "b"}} if method == "post" else None
        answer = httpx.request(method, f"{url}/{id}{end}", json=body)
        route = "/v1/chat/completions/{completion_id}" + end
        check(document, schema_of(document, route, method, str(answer.status_code)), answer.json())
    assert answer.status_code == 404


def test_files_and_batches_fit(server: Any, document: dict[str, Any]) -> None:
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": HI, "max_tokens": 1}}
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
    made = httpx.post(f"{server.url}/v1/files", files=upload, data={"purpose": "batch"}, timeout=240)
    check(document, schema_of(document, "/v1/files", "post"), made.json())
    body = {"input_file_id": (id := made.json()["id"]), "endpoint": line["url"]}
    batch = httpx.post(f"{server.url}/v1/batches", json=body, timeout=240)
    check(document, schema_of(document, "/v1/batches", "post"), batch.json())
    while httpx.get(f"{server.url}/v1/batches/{batch.json()['id']}").json()["status"] != "completed":
        time.sleep(0.05)
    for method, route, path in (
        ("get", "/v1/batches", ""), ("get", "/v1/batches/{batch_id}", f"/{batch.json()['id']}"),
        ("post", "/v1/batches/{batch_id}/cancel", f"/{batch.json()['id']}/cancel"), ("get", "/v1/files", ""),
        ("get", "/v1/files/{file_id}", f"/{id}"), ("delete", "/v1/files/{file_id}", f"/{id}"),
        ("get", "/v1/files/{file_id}", f"/{id}"), ("get", "/v1/files/{file_id}/content", f"/{id}/content"),
    ):  # fmt: skip
        answer = httpx.request(method, f"{server.url}{'/'.join(route.split('/')[:3])}{path}")
        check(document, schema_of(document, route, method, str(answer.status_code)), answer.json())
    assert answer.status_code == 404


def _about_a_conversation(server: Any) -> Iterator[tuple[str, str, str, Any]]:
    yield "post", "/v1/conversations", "/v1/conversations", {"metadata": {"a": "b"}}
    item = [{"role": "user", "content": "Hello"}]
    id = httpx.post(f"{server.url}/v1/conversations", json={"items": item}).json()["id"]
    (first,) = httpx.get(f"{server.url}/v1/conversations/{id}/items").json()["data"]
    path, one = "/v1/conversations/{conversation_id}", f"/v1/conversations/{id}"
    yield "get", path, one, None
    yield "post", path, one, {"metadata": {}}
    yield "post", f"{path}/items", f"{one}/items", {"items": item}
    yield "get", f"{path}/items", f"{one}/items", None
    yield "get", f"{path}/items/{{item_id}}", f"{one}/items/{first['id']}", None
    yield "delete", f"{path}/items/{{item_id}}", f"{one}/items/{first['id']}", None
    yield "post", "/v1/responses", "/v1/responses", {"input": "Hello", "conversation": id, "max_output_tokens": 2}
    yield "delete", path, one, None


def test_other_answers_fit(server: Any, document: dict[str, Any]) -> None:
    requests: list[tuple[str, str, str, Any]] = [
        ("get", "/v1/models", "/v1/models", None),
        ("get", "/v1/models/{model}", "/v1/models/demo", None),
        ("get", "/load", "/load", None),
        ("get", "/version", "/version", None),
        ("get", "/server_info", "/server_info", None),
        ("get", "/server_info", "/server_info?steps=8", None),
        ("post", "/tokenize", "/tokenize", {"prompt": "Hello", "return_token_strs": True}),
        ("post", "/tokenize", "/tokenize", {"messages": HI}),
        ("post", "/detokenize", "/detokenize", {"tokens": [1, 2]}),
        ("post", "/v1/chat/completions/render", "/v1/chat/completions/render", {"messages": HI}),
        ("post", "/v1/responses/input_tokens", "/v1/responses/input_tokens", {"input": "Hello"}),
        ("post", "/v1/responses/compact", "/v1/responses/compact", {"input": "Hello", "min_tokens": 2}),
        ("post", "/v1/completions/render", "/v1/completions/render", {"prompt": ["Hello", "you"]}),
        *_about_a_conversation(server),
        *(
            ("post", "/v2/chat", "/v2/chat", {"messages": HI, "max_tokens": 9, "logprobs": flag})
            for flag in (True, False)
        ),
        ("post", "/v1/responses/render", "/v1/responses/render", {"input": "Hello", "return_token_offsets": True}),
        ("post", "/v1/messages/render", "/v1/messages/render", {"messages": HI, "max_tokens": 9}),
        (
            "post",
            "/inference/v1/generate",
            "/inference/v1/generate",
            {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 1}},
        ),
        (
            "post",
            "/v1/chat/completions/derender",
            "/v1/chat/completions/derender",
            {"generate_response": {"choices": [{"index": 0, "token_ids": [5, 6]}]}},
        ),
        (
            "post",
            "/v1/completions/derender",
            "/v1/completions/derender",
            {"generate_responses": [{"choices": [{"index": 0, "token_ids": [5, 6]}]}]},
        ),
        *(
            (
                "post",
                f"/v1/{kind}/derender",
                f"/v1/{kind}/derender",
                {"stream": True, "generate_chunk": {"choices": [{"index": 0, "token_ids": [5, 6]}]}},
            )
            for kind in ("chat/completions", "completions")
        ),
        ("get", "/tokenizer_info", "/tokenizer_info", None),
        ("post", "/invocations", "/invocations", {"messages": HI, "max_tokens": 2}),
        ("post", "/v1/engines/{model}/completions", "/v1/engines/demo/completions", {"prompt": "Hello"}),
        ("post", "/v1/messages/count_tokens", "/v1/messages/count_tokens", {"messages": HI}),
        ("post", "/v1/embeddings", "/v1/embeddings", {"input": ["Hello", "you"]}),
        ("post", "/v1/embeddings", "/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"}),
        ("post", "/v2/embed", "/v2/embed", {"texts": ["Hello"], "embedding_types": ["float", "ubinary", "base64"]}),
        ("post", "/pooling", "/pooling", {"input": ["Hello", "you"]}),
        ("post", "/pooling", "/pooling", {"input": ["Hello"], "task": "token_embed"}),
        ("post", "/score", "/score", {"text_1": "Hello", "text_2": ["you", "me"]}),
        ("post", "/rerank", "/rerank", {"query": "Hello", "documents": ["you"], "return_documents": False}),
        ("post", "/v2/rerank", "/v2/rerank", {"query": "Hello", "documents": ["you"]}),
    ]
    for method, route, path, body in requests:
        answer = httpx.request(method, f"{server.url}{path}", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        check(document, schema_of(document, route, method), answer.json())


def test_an_answer_may_be_bytes(server: Any, document: dict[str, Any]) -> None:
    for path in ("/v1/embeddings", "/pooling", "/invocations"):
        answer = httpx.post(
            f"{server.url}{path}", json={"input": "Hello", "encoding_format": "bytes_only"}, timeout=240
        )
        kind = answer.headers["content-type"]
        assert answer.status_code == 200 and kind == "application/octet-stream" and len(answer.content) == 1024
        assert kind in document["paths"][path]["post"]["responses"]["200"]["content"]


def test_errors_fit(server: Any, document: dict[str, Any]) -> None:
    requests: list[tuple[str, str, Any, int]] = [
        ("/v1/chat/completions", "/v1/chat/completions", {"messages": []}, 400),
        ("/v1/completions", "/v1/completions", {"prompt": "x", "model": "other"}, 404),
        ("/v1/responses", "/v1/responses", {"input": "x", "previous_response_id": "x"}, 400),
        ("/v1/responses/compact", "/v1/responses/compact", {}, 400),
        ("/v1/messages", "/v1/messages", {"messages": HI}, 400),
        ("/tokenize", "/tokenize", {}, 400),
        ("/classify", "/classify", {"input": "a model that generates"}, 400),
        ("/abort_request", "/abort_request", {"request_id": "none"}, 404),
        ("/v1/requests/{request_id}/cancel", "/v1/requests/none/cancel", None, 404),
    ]
    for route, path, body, status in requests:
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=240)
        assert answer.status_code == status
        check(document, schema_of(document, route, "post", str(status)), answer.json())


def events_fit(context: Any, response: Any, case: Any) -> None:
    """What schemathesis cannot see: the data of each event of a stream."""
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        document = case.operation.schema.raw_schema
        name = schema_of(document, case.operation.path, "post", kind="text/event-stream")
        for event in events(response.content.decode()):
            failed = "error" in event
            failure = schema_of(document, case.operation.path, "post", "400")
            check(document, failure if failed else name, event)
            assert not failed or event["error"]["type"] not in ("server_error", "api_error"), event


def thin_out(case: Any, document: dict[str, Any], data: st.DataObject) -> None:
    """Of many fields some two always contradict each other, and most texts are empty: this leaves what can be right."""
    body = case.body
    if not isinstance(body, dict):
        return
    # JSON Schema calls 188.0 an integer and this server does not; how often it is drawn depends on hypothesis, which
    # looks for constants in whatever modules happen to be loaded.
    body = {field: int(v) if isinstance(v, float) and v.is_integer() else v for field, v in body.items()}
    content = case.operation.definition.raw["requestBody"]["content"]
    if "application/json" not in content:  # a form
        return
    name = content["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][name.rpartition("/")[2]]
    if "properties" not in schema:  # one of several requests, each of which has its own route
        return
    if case.operation.path == "/tokenize":
        body.pop("messages" if body.get("prompt") is not None else "prompt", None)
    needed = {*schema.get("required", ()), "messages", "prompt"}
    optional = sorted(schema["properties"].keys() & body.keys() - needed)
    kept = data.draw(st.lists(st.sampled_from(optional), max_size=3)) if optional else []
    case.body = body = {field: value for field, value in body.items() if field in needed or field in kept}
    if "model" in body:
        body["model"] = "demo"
    if "messages" in body:
        body["messages"] = body["messages"] or HI
        if case.operation.path == "/v1/chat/completions/batch":
            body["messages"] = [
                conversation or HI for conversation in body["messages"] if isinstance(conversation, list)
            ]
            body["messages"] = body["messages"][:3] or [HI]
        several = [one if isinstance(one, list) else [one] for one in body["messages"]]
        for message in (message for one in several for message in one):
            if not isinstance(message.get("content"), str):
                message["content"] = "Hello"
    if isinstance(body.get("prompt"), list):
        several = [[token % 1000 for token in p] if isinstance(p, list) else p for p in body["prompt"] if p]
        body["prompt"] = [p % 1000 if isinstance(p, int) else p for p in several]
    if not body.get("prompt", "x") or (case.operation.path == "/tokenize" and "messages" not in body):
        body["prompt"] = body.get("prompt") or "Hello"
    if case.operation.path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        body["input"] = "Hello"
        body.pop("previous_response_id", None)
    if case.operation.path in INPUTS and body.get("messages") and not body.get("input"):
        body.pop("input", None)
    elif case.operation.path in INPUTS:
        for field in ("messages", "add_generation_prompt", "continue_final_message", "chat_template"):
            body.pop(field, None)
        body.pop("chat_template_kwargs", None)
        given = body.get("input") or "Hello"
        if isinstance(given, list):
            given = [[token % 1000 for token in one] if isinstance(one, list) else one for one in given if one]
            given = [one % 1000 if isinstance(one, int) else one for one in given]
        body["input"] = given or "Hello"
        body.pop("prompt_name", None)
    if case.operation.path == "/v2/embed":
        body = {field: value for field, value in body.items() if field not in ("images", "inputs")}
        case.body = body | {"texts": ["Hello"], "input_type": "clustering"}
    if case.operation.path.endswith("/rerank"):
        body |= {"query": body.get("query") or "Hello", "documents": ["you", {"text": "me"}]}
    if case.operation.path.endswith("/score"):
        names = ("queries", "text_1", "data_1", "documents", "items", "text_2", "data_2", "instruction")
        case.body = {field: value for field, value in body.items() if field not in names}
        case.body |= {"queries": "Hello", "documents": ["you", "me"]}
    if body.get("n"):
        body["n"] = 1 + body["n"] % 4  # the document has the most of all servers, and this one runs few at once
    if "tokens" in body:
        body["tokens"] = [token % 1000 for token in body["tokens"]]


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_whatever_fits_is_answered(server: Any, document: dict[str, Any], mode: str, until: Any) -> None:
    """schemathesis makes requests from the document, right ones and wrong ones; the same ones each time."""
    schema = schemathesis.openapi.from_dict(document)
    generation = schemathesis.GenerationMode.POSITIVE if mode == "positive" else schemathesis.GenerationMode.NEGATIVE
    statuses: Counter[tuple[str, int]] = Counter()
    bodies: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode == "negative" and not operation.body.items:
            continue  # any name may be in a path, and nothing else can be wrong
        # A body that another route has read sixty times is read here by the same code; what follows is its own.
        body = json.dumps(operation.definition.raw.get("requestBody"))
        examples = 30 if operation.path in ANSWERED or body not in bodies else 20
        bodies.add(body)

        @given(case=operation.as_strategy(generation_mode=generation), data=st.data())
        @settings(
            max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def ask(case: Any, data: st.DataObject) -> None:
            if mode == "positive":
                thin_out(case, document, data)
            answer = case.call_and_validate(
                base_url=server.url, checks=CHECKS, additional_checks=[events_fit], timeout=240
            )
            statuses[case.operation.path, answer.status_code] += 1

        ask()
    assert sum(statuses.values()) > 200
    if mode == "positive":
        for path in ANSWERED:
            assert statuses[path, 200] > 20, statuses
    assert httpx.get(f"{server.url}/health").status_code == 200
    until(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0})
