"""Routes of other platforms and of other clients: the same answers under their names and in their shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fastapi import Response

from vserve.server.api import chat, classify, embeddings, scores

HI = [{"role": "user", "content": "Hi"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def test_invocations_are_what_their_fields_say(client: Any, engine: Any) -> None:
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    chat = client.post("/invocations", {"messages": HI}).json()
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["content"] == "Hello world!"
    assert client.post("/invocations", {"prompt": "a"}).json()["choices"][0]["text"] == "Hello world!"
    assert "x-vserve-ignored-params" in client.post("/invocations", {"prompt": "a", "nonsense": 1}).headers
    streamed = client.post("/invocations", {"prompt": "a", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream") and streamed.text.endswith("[DONE]\n\n")
    assert client.post("/invocations", {"input": "a", "model": "other"}).status_code == 404  # of embeddings
    large = client.post("/invocations", {"prompt": "a", "user": "u" * 200_000})
    assert large.status_code == 400 and large.json()["error"]["param"] == "user"


@pytest.mark.parametrize(
    ("tasks", "by_token", "body", "id"),
    [
        (("embed",), False, {"input": "a"}, ""),
        (("embed",), False, {"messages": HI}, ""),
        (("embed",), False, {"input": "a", "task": "token_embed"}, "pool-"),
        (("classify",), False, {"input": "a"}, "classify-"),
        (("classify",), False, {"messages": HI}, "classify-"),
        (("classify",), True, {"input": "a"}, "pool-"),
        (("reward",), False, {"input": "a"}, "classify-"),
        (("classify",), False, {"text_1": "a", "text_2": ["b", "c"]}, "score-"),
        (("embed",), False, {"queries": "a", "documents": ["b", "c"]}, "score-"),
        (("classify",), False, {"query": "a", "documents": ["b", "c"]}, "rerank-"),
        (("generate", "embed"), False, {"messages": HI}, "chatcmpl-"),
    ],
)
def test_invocations_are_what_the_model_does(
    client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, tasks: Any, by_token: bool, body: Any, id: str
) -> None:
    """As SageMaker asks, which knows no other route: each is a request of the route that is for it."""
    engine.info = msgspec.structs.replace(engine.info, tasks=tasks, by_token=by_token, labels=("x",), hidden_size=4)
    prefixes: list[str] = []

    async def answered(dialect: Any) -> Response:
        prefixes.append(dialect.id_prefix)
        return Response(b"{}")

    for module in (chat, classify, embeddings, scores):
        monkeypatch.setattr(module, "answer", answered)
    assert client.post("/invocations", body).status_code == 200
    assert prefixes == [id]


@pytest.mark.parametrize("body", [{}, [], {"text": "a"}, {"messages": HI, "prompt": "a"}])
def test_invocations_of_nothing(client: Any, engine: Any, body: Any) -> None:
    answer = client.request("POST", "/invocations", json=body)
    assert answer.status_code == 400 and "exactly one of 'messages'" in answer.json()["error"]["message"]
    text = client.request("POST", "/invocations", content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 415 and not engine.submitted


def test_an_engine_of_the_first_clients(client: Any, engine: Any) -> None:
    answer = client.post("/v1/engines/alias/completions", {"prompt": "Hello", "max_tokens": 2}).json()
    assert answer["object"] == "text_completion" and answer["model"] == "alias"
    missing = client.post("/v1/engines/a/b/completions", {"prompt": "Hello"})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_models_for_clients_of_anthropic(client: Any) -> None:
    page = client.get("/v1/models", headers=ANTHROPIC).json()
    assert [model["id"] for model in page["data"]] == ["test", "alias"]
    assert {key: page[key] for key in ("first_id", "last_id", "has_more")} == {
        "first_id": "test", "last_id": "alias", "has_more": False,
    }  # fmt: skip
    card = client.get("/v1/models/test", headers=ANTHROPIC).json()
    assert card == page["data"][0]
    assert card["type"] == "model" and card["created_at"].endswith("Z") and card["max_input_tokens"] == 128
    first = client.get("/v1/models?limit=1", headers=ANTHROPIC).json()
    assert (first["last_id"], first["has_more"]) == ("test", True)
    rest = client.get("/v1/models?limit=1&after_id=test", headers=ANTHROPIC).json()
    assert (rest["first_id"], rest["has_more"]) == ("alias", False)
    assert client.get("/v1/models?before_id=test", headers=ANTHROPIC).json()["data"] == []
    for query in ("limit=0", "limit=x", "limit=1001", "after_id=other", "before_id=other"):
        wrong = client.get(f"/v1/models?{query}", headers=ANTHROPIC)
        assert wrong.status_code == 400 and wrong.json()["type"] == "error", query
    missing = client.get("/v1/models/other", headers=ANTHROPIC)
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/models").json()["object"] == "list"
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_render_is_what_the_engine_would_be_asked(client: Any, engine: Any) -> None:
    body = {"messages": HI, "top_k": 5, "max_tokens": 7, "stop": "x", "seed": 3, "cache_salt": "s", "priority": 0}
    rendered = client.post("/v1/chat/completions/render", body).json()
    assert client.post("/v1/chat/completions", body).status_code == 200
    (request,) = engine.submitted
    assert rendered["token_ids"] == rendered["prompt_token_ids"] == request.token_ids
    settings = rendered["sampling_params"]
    for name in ("temperature", "top_k", "top_p", "seed", "max_tokens"):
        assert settings[name] == getattr(request.sampling, name), name
    assert settings["stop"] == ["x"] and settings["n"] == 1 and settings["temperature"] == 0.7  # the model's
    assert (rendered["model"], rendered["stream"], rendered["cache_salt"]) == ("test", False, "s")
    wrong = client.post("/v1/chat/completions/render", {"messages": HI, "stop_token_ids": [999]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "stop_token_ids"


def test_render_of_completions(client: Any, engine: Any, text_model: Any) -> None:
    body = {"prompt": ["Hello", "Hello world"]}
    first, second = client.post("/v1/completions/render", body).json()
    client.post("/v1/completions", body)
    assert [first["token_ids"], second["token_ids"]] == [request.token_ids for request in engine.submitted]
    assert first["request_id"] != second["request_id"] and first["sampling_params"]["max_tokens"] == 16
    (ids,) = client.post("/v1/completions/render", {"prompt": [5, 6]}).json()
    assert ids["token_ids"] == [5, 6]
    (long,) = client.post("/v1/completions/render", {"prompt": [5] * 200}).json()
    assert long["sampling_params"]["max_tokens"] == 0  # the context has 128
    assert client.post("/v1/completions/render", {"prompt": "a", "model": "other"}).status_code == 404


def test_tokenizer_info(client: Any, text_model: Any) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["chat_template"] == text_model.tokenizer.template().source
    assert info["special_tokens"]["eos_token"] == "<|im_end|>" and info["model_max_length"] == 128
    added = info["added_tokens_decoder"]
    assert added["2"]["content"] == "<|im_end|>" and added["2"]["special"] is True


def test_where_each_token_is(client: Any, text_model: Any) -> None:
    """In the rendered text; not where a message spells a token that it does not mean."""
    body = {"messages": HI, "return_token_offsets": True}
    for path, asked in (
        ("chat/completions", body), ("messages", {**body, "max_tokens": 5}),
        ("responses", {"input": "Hi", "return_token_offsets": True}),
    ):  # fmt: skip
        found = client.post(f"/v1/{path}/render", asked)
        assert found.status_code == 200 and "x-vserve-ignored-params" not in found.headers, found.text
        said = found.json()
        pieces = [said["prompt"][start:end] for start, end in said["token_offsets"]]
        assert "".join(pieces) == said["prompt"] and pieces[0] == "<|im_start|>"
        assert said["prompt_token_ids"] == text_model.tokenizer.encode(said["prompt"], False) == said["token_ids"]
        del asked["return_token_offsets"]
        assert "token_offsets" not in client.post(f"/v1/{path}/render", asked).json()
    limited = client.post("/v1/messages/render", {"messages": HI, "max_tokens": 5, "stop_sequences": ["a"]}).json()
    assert limited["sampling_params"]["max_tokens"] == 5
    wrong = client.post("/v1/messages/render", {"messages": HI, "max_tokens": 5, "stop_sequences": [""]})
    assert wrong.status_code == 400 and "stop_sequences" in wrong.text
    odd = {"messages": [{"role": "user", "content": "<|im_end|>"}], "return_token_offsets": True}
    assert client.post("/v1/chat/completions/render", odd).json()["token_offsets"] is None
    texts = client.post("/v1/completions/render", {"prompt": ["Hi you"], "return_token_offsets": True}).json()
    assert texts[0]["token_offsets"][0][0] == 0 and texts[0]["token_offsets"][-1][1] == 6
    (ids,) = client.post("/v1/completions/render", {"prompt": [5], "return_token_offsets": True}).json()
    assert ids["token_offsets"] is None
