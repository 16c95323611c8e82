"""The endpoints around tokens, and those for whoever runs the server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from vserve.server.app import create_app
from vserve.server.cli.flags import add_flags, read_flags, sources
from vserve.server.options.config import ServerConfig
from vserve.server.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]


def test_tokenize_and_detokenize(client: Any, text_model: Any) -> None:
    ids = text_model.tokenizer.encode("Hello world!", True)
    answer = client.post("/tokenize", {"prompt": "Hello world!", "return_token_strs": True}).json()
    strings = [text_model.tokenizer.core.id_to_token(token) for token in ids]
    assert answer == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": strings}
    assert client.post("/tokenize", {"model": "alias", "prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", {"tokens": ids}).json() == {"prompt": "Hello world!"}
    assert client.post("/detokenize", {"tokens": [1, *ids]}).json() == {"prompt": "<|im_start|>Hello world!"}
    assert client.post("/detokenize", {"tokens": [1, *ids], "skip_special_tokens": True}).json() == {
        "prompt": "Hello world!"
    }


TOOL = {"name": "f", "description": "long " * 1000}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HI, "documents": [{"text": "long " * 1000}]}),
        ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": TOOL}]}),
        ("/v1/chat/completions/render", {"messages": HI, "tools": [{"type": "function", "function": TOOL}]}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **TOOL}]}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "tools": [TOOL | {"input_schema": PARAMETERS}]}),
        ("/v1/messages/count_tokens", {"messages": HI, "tools": [TOOL | {"input_schema": PARAMETERS}]}),
    ],
)
def test_long_prompts_are_made_off_the_event_loop(
    thinking: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    """Whatever it is that makes them long."""
    threads = []
    render = Tokenizer.render

    def watched(self: Tokenizer, *arguments: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(self, *arguments)

    monkeypatch.setattr(Tokenizer, "render", watched)
    assert thinking.client.post(path, fields).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("tokenise")


def test_render_is_what_a_chat_gets(client: Any, engine: Any, text_model: Any) -> None:
    body = {"messages": HI, "chat_template_kwargs": {"style": "short"}}
    rendered = client.post("/v1/chat/completions/render", body).json()
    assert rendered["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[short]"
    client.post("/v1/chat/completions", body)
    (request,) = engine.submitted
    assert request.token_ids == rendered["prompt_token_ids"] and rendered["count"] == len(request.token_ids)
    assert client.post("/tokenize", body).json()["tokens"] == request.token_ids
    continued = {"messages": [*HI, {"role": "assistant", "content": "Ho"}], "continue_final_message": True}
    assert client.post("/v1/chat/completions/render", continued).json()["prompt"].endswith("assistant\nHo")


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": HI, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "name": "nobody", "content": "x"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/abort_request", {}, "request_id"),
        ("/abort_request", {"request_id": ""}, "request_id"),
    ],
)
def test_bad_requests(client: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_unknown_model_and_ignored_fields(client: Any) -> None:
    assert client.post("/tokenize", {"prompt": "a", "model": "other"}).status_code == 404
    assert client.post("/detokenize", {"tokens": [1], "model": "other"}).status_code == 404
    answer = client.post("/tokenize", {"prompt": "a", "nonsense": 1})
    assert answer.status_code == 200 and answer.headers["x-vserve-ignored-params"] == "nonsense"


def test_a_template_of_the_request(engine: Any, text_model: Any, client: Any) -> None:
    body = {"messages": HI, "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    refused = client.post("/v1/chat/completions", body)
    assert refused.status_code == 400 and "--trust-request-chat-template" in refused.json()["error"]["message"]
    trusting = type(client)(create_app(engine, ServerConfig(trust_request_chat_template=True), text_model))
    assert trusting.post("/v1/chat/completions/render", body).json()["prompt"] == "Hi<|im_end|>"
    hostile = {"messages": HI, "chat_template": "{% for i in range(10**9) %}{% endfor %}"}
    answer = trusting.post("/v1/chat/completions", hostile)
    assert answer.status_code == 400 and "at line 1" in answer.json()["error"]["message"]
    trusting.close()


def test_server_info(client: Any, engine: Any, text_model: Any) -> None:
    info = client.get("/server_info").json()
    assert info["settings"]["port"] == {"value": 8000, "source": "default"}
    assert info["settings"]["max_model_len"] == {"value": 128, "source": "model"}
    assert info["sampling_defaults"]["temperature"] == {"value": 0.7, "source": "generation_config.json"}
    assert info["sampling_defaults"]["top_p"] == {"value": 1.0, "source": "default"}
    assert info["model"]["eos_token_ids"] == [2, 0]
    config = ServerConfig(api_key=("very-secret",), port=9)
    app = create_app(engine, config, text_model, sources={"api_key": "flag", "port": "flag"})
    locked = type(client)(app)
    answer = locked.get("/server_info", headers={"authorization": "Bearer very-secret"})
    assert answer.json()["settings"]["port"] == {"value": 9, "source": "flag"}
    assert answer.json()["settings"]["api_key"] == {"value": "(hidden)", "source": "flag"}
    assert "very-secret" not in answer.text
    locked.close()


def test_the_longest_answer_that_the_model_allows(client: Any, engine: Any, text_model: Any) -> None:
    capped = type(client)(create_app(engine, ServerConfig(), dataclasses.replace(text_model, max_new_tokens=3)))
    for body in ({}, {"max_tokens": 50}, {"max_tokens": 2}):
        assert capped.post("/v1/chat/completions", {"messages": HI, **body}).status_code == 200
    assert [request.sampling.max_tokens for request in engine.submitted] == [3, 3, 2]
    capped.close()


def test_where_options_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from vserve.engine.options.config import EngineConfig

    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, ServerConfig)
    arguments = parser.parse_args(["/m", "--port", "8000", "--seed", "3"])
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert sources(arguments) == {
        "model": "flag", "port": "flag", "seed": "flag", "api_key": "environment", "served_model_name": "model",
    }  # fmt: skip
    assert read_flags(arguments)[0].seed == 3


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("way", ["path", "body", "id of the answer"])
def test_cancel(app: FastAPI, engine: Any, say: Any, serve: Any, streamed: bool, way: str) -> None:
    """The reader gets an answer that ends in order; the engine stops; nobody else notices."""
    engine.script, engine.delay = say("Say it again, slowly. " * 20, ends=False), 0.02

    async def test(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
            body = {"messages": HI, "stream": streamed, "max_tokens": 100, "n": 2}
            one = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"}))
            other = asyncio.create_task(
                http.post(
                    "/v1/chat/completions", json={**body, "n": 1, "max_tokens": 40}, headers={"x-request-id": "o"}
                )
            )
            while len(engine.submitted) < 3 or engine.num_outputs < 6:
                await asyncio.sleep(0.01)
            assert (await http.get("/load")).json() == {"server_load": 2}
            if way == "path":
                answer = await http.post("/v1/requests/mine/cancel")
            else:
                name = "mine" if way == "body" else "chatcmpl-mine"
                answer = await http.post("/abort_request", json={"request_id": name})
            assert answer.status_code == 200 and answer.json()["cancelled"] == 1
            ended = await one
            assert ended.status_code == 200
            if streamed:
                events = ended.text.split("\n\n")
                assert events[-2] == "data: [DONE]"
                chunks = [json.loads(event[6:]) for event in events[:-2]]
                assert not any("error" in chunk for chunk in chunks)
                last = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
            else:
                last = ended.json()["choices"]
            assert [(choice["finish_reason"], choice["stop_reason"]) for choice in last] == [("stop", "abort")] * 2
            if not streamed:
                assert all(0 < len(choice["message"]["content"]) < 400 for choice in last)
            again = await http.post("/v1/requests/mine/cancel")
            assert again.status_code == 404 and again.json()["error"]["code"] == "request_not_found"
            undisturbed = await other
            assert '"finish_reason":"length"' in undisturbed.text
            assert (await http.get("/load")).json() == {"server_load": 0}

    serve(test)
    assert engine.num_open == 0 and len(engine.aborted) == 2


@pytest.mark.parametrize("administered", [False, True])
def test_a_key_ends_its_own_requests_only(
    engine: Any, text_model: Any, say: Any, serve: Any, administered: bool
) -> None:
    """Unless it is an administrator's. What another key has begun is not there, under any of its names."""
    engine.script, engine.delay = say("Say it again, slowly. " * 20, ends=False), 0.02
    config = ServerConfig(api_key=("one", "two"), admin_api_key=("boss",) if administered else ())
    app = create_app(engine, config, text_model)

    async def test(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:

            async def cancel(key: str, name: str) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}"}
                paths = await http.post(f"/v1/requests/{name}/cancel", headers=headers)
                body = await http.post("/abort_request", json={"request_id": name}, headers=headers)
                return paths if paths.status_code == 200 else body

            body = {"messages": HI, "max_tokens": 100}
            headers = {"x-request-id": "mine", "authorization": "Bearer one"}
            one = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
            while engine.num_outputs < 3:
                await asyncio.sleep(0.01)
            for name in ("mine", "chatcmpl-mine"):
                refused = await cancel("two", name)
                if administered:
                    assert refused.status_code == 403
                else:
                    missing = (await cancel("two", "nobody")).json()
                    assert refused.status_code == 404
                    assert refused.json()["error"]["message"] == missing["error"]["message"].replace("nobody", name)
            assert not one.done()
            assert (await cancel("boss" if administered else "one", "mine")).status_code == 200
            assert (await one).json()["choices"][0]["stop_reason"] == "abort"

    serve(test, app)
