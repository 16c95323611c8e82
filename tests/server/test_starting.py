"""What whoever starts a server waits for, and what is printed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.link.messages import Progress
from vserve.engine.options.config import EngineConfig
from vserve.server.cli.progress import ProgressLine, example, purpose
from vserve.server.http.front_door import FrontDoor
from vserve.server.http.page import load_page
from vserve.server.options.config import ServerConfig
from vserve.server.service import Service


async def load(monkeypatch: Any, engine: Any) -> Any:
    """Service._load() where the tokenizer cannot be read, and the engine starts as `engine(client)` says."""

    def no_tokenizer() -> Any:
        raise ConfigError("no tokenizer")

    with socket.socket() as sock:
        service = Service(EngineConfig(model="m"), ServerConfig(), {}, sock, ProgressLine())
        monkeypatch.setattr(service, "_make_app", no_tokenizer)
        monkeypatch.setattr(service.client, "start", lambda: engine(service.client))
        return await asyncio.wait_for(service._load(), 60)


def report(client: Any, phase: str) -> None:
    for listener in list(client.progress_listeners):
        listener(Progress(phase))


def test_nobody_waits_for_the_weights_of_a_model_without_a_tokenizer(monkeypatch: Any) -> None:
    async def loads_for_ever(client: Any) -> None:
        report(client, "config")  # where a model is downloaded
        await asyncio.Event().wait()

    with pytest.raises(ConfigError, match="no tokenizer"):
        asyncio.run(load(monkeypatch, loads_for_ever))


def test_the_announcement(capfd: Any) -> None:
    info: Any = SimpleNamespace(
        device="cpu",
        dtype="float32",
        max_model_len=2048,
        startup_seconds={"device": 0.01, "weights": 1.5},
        tasks=("generate", "embed"),
    )
    with socket.create_server(("127.0.0.1", 0)) as sock:
        ProgressLine().ready(info, ServerConfig(host="127.0.0.1", served_model_name=("m",)), sock, 3.5)
        port = sock.getsockname()[1]
    out = capfd.readouterr().out
    assert "context 2048 tokens; ready in 3.5 s (imports 2.0, weights 1.5)\n" in out  # what took no time is not listed
    assert f"curl http://localhost:{port}/v1/chat/completions" in out


@pytest.mark.parametrize(
    ("options", "chats", "command"),
    [
        ({}, True, "curl http://h/v1/chat/completions -H 'content-type: application/json'"),
        ({}, False, "curl http://h/v1/completions -H 'content-type: application/json'"),
        (
            {"api_key": ("sesame",)}, True,
            "curl http://h/v1/chat/completions -H \"authorization: Bearer $VSERVE_API_KEY\" -H "
            "'content-type: application/json'",
        ),
        (
            {"ssl_certfile": "my cert.pem", "ssl_cert_reqs": 2}, True,
            "curl http://h/v1/chat/completions --cacert 'my cert.pem' --cert YOURS.pem -H "
            "'content-type: application/json'",
        ),
    ],
)  # fmt: skip
def test_the_example_is_one_that_this_server_answers(
    options: dict[str, Any], chats: bool, command: str, monkeypatch: Any
) -> None:
    for variable in ("VSERVE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    config = ServerConfig()
    for name, value in options.items():  # beside what checks whether the file is there
        object.__setattr__(config, name, value)
    first, second = example(config, "http://h", "it's", chats).split(" \\\n    -d ")
    assert first == command and "sesame" not in first
    body = json.loads(shlex.split(second)[0])
    assert body.pop("model") == "it's" and next(iter(body)) == ("messages" if chats else "prompt")
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert "Bearer $VSERVE_API_KEY" in example(config, "http://h", "m", chats)


@pytest.mark.parametrize(("total", "shown"), [(9_056_656, "4.5 of 9.1 MB"), (16_000_000_000, "8.0 of 16.0 GB")])
def test_the_progress_line(total: int, shown: str, monkeypatch: Any) -> None:
    reader, terminal = os.openpty()
    with open(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        line = ProgressLine()
        line(Progress("weights", total // 2, total))
        text = os.read(reader, 1000).decode()
    os.close(reader)
    assert f" 50%  {shown}" in text


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/v1/completions"])
def test_answers_while_loading_have_an_id(path: str) -> None:
    engine: Any = SimpleNamespace(dead=None, down=None, ready=False, phase=Progress("weights", 1, 4), retry_after=1)
    transport = httpx.ASGITransport(FrontDoor(engine, page=load_page()))

    async def ask(**headers: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get(path, headers=headers)

    async def main() -> None:
        given = await ask(**{"x-request-id": "mine 1"})
        assert given.headers["x-request-id"] == "mine1"
        first, second = await ask(), await ask()
        assert len({first.headers["x-request-id"], second.headers["x-request-id"], ""}) == 3

    asyncio.run(main())


def test_a_model_that_writes_no_text_is_not_told_to(engine: Any) -> None:
    config = ServerConfig(served_model_name=("m",))
    assert purpose(engine.info) == "" and "/v1/completions" in example(config, "http://h", "m", False)
    for tasks, labels, words, path in (
        (("embed",), (), " (embed; no text)", "/v1/embeddings"),
        (("classify",), ("a", "b"), " (classify of 2 labels; no text)", "/classify"),
        (("reward",), ("a",), " (reward of 1 label; no text)", "/classify"),
    ):
        assert purpose(msgspec.structs.replace(engine.info, tasks=tasks, labels=labels)) == words
        shown = example(config, "http://h", "m", True, tasks)
        assert shown.startswith(f"curl http://h{path} ") and '"input": "Hello!"' in shown
