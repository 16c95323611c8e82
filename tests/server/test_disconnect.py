"""Whoever leaves is aborted, over real sockets: streamed or not, before the first token or after."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest


async def send(port: int, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # a client that does not read stops the server soon
    sock.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 14)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


BODIES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 100}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 100, "n": 2}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path, body", BODIES)
@pytest.mark.parametrize("reset", [False, True])
def test_leaving_aborts(serve: Any, engine: Any, path: str, body: dict[str, Any], stream: bool, reset: bool) -> None:
    engine.delay, engine.script = 0.01, lambda request: [[50]] * 1000

    async def test(port: int) -> None:
        reader, writer = await send(port, path, {**body, "stream": stream})
        num_choices = len(body.get("prompt", "x")) * 2 if body.get("n") else 1
        await until(lambda: engine.num_outputs >= 3 * num_choices)
        if stream:
            assert b"data: " in await reader.read(2000)
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: len(engine.aborted) == num_choices)
        assert engine.num_open == 0
        num_outputs = engine.num_outputs
        await asyncio.sleep(0.05)
        assert engine.num_outputs == num_outputs  # nothing was computed for nobody

    serve(test)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue_aborts(serve: Any, engine: Any, stream: bool) -> None:
    """No token yet: a stream has not even sent its status."""
    engine.delay = 1000.0

    async def test(port: int) -> None:
        _, writer = await send(port, "/v1/completions", {"prompt": "Hi", "stream": stream})
        await until(lambda: engine.num_open == 1)
        writer.close()
        await until(lambda: engine.aborted == [0])

    serve(test)


def test_leaving_while_tokenising_submits_nothing(serve: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from vserve.server.text.tokenizer import Tokenizer

    started, go = threading.Event(), threading.Event()

    def slow(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        started.set()
        go.wait(60)
        return [5]

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def test(port: int) -> None:
        _, writer = await send(port, "/v1/completions", {"prompt": "long " * 1000})
        await until(started.is_set)
        writer.close()
        for _ in range(50):  # turns of the loop, in which the server hears of it
            await asyncio.sleep(0.001)
        go.set()
        await asyncio.sleep(0.05)
        assert not engine.submitted

    serve(test)


def test_others_are_not_aborted(serve: Any, engine: Any, text_model: Any) -> None:
    engine.delay, engine.script = 0.005, lambda request: [*([[50]] * 40), [2]]

    async def test(port: int) -> None:
        body = {"prompt": "Hi", "max_tokens": 100, "stream": True}
        # a writer that nobody holds is closed
        (stay, _writer), (_, leave) = [await send(port, "/v1/completions", body) for _ in range(2)]
        await until(lambda: engine.num_outputs > 6)
        leave.close()
        raw = await stay.readuntil(b"data: [DONE]\n\n")
        letter = text_model.tokenizer.token_bytes(50).decode()
        assert raw.count(f'"text":"{letter}"'.encode()) == 40
        assert engine.aborted == [1]

    serve(test)


def test_stream_is_sent_as_it_comes(serve: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine makes no token before the client has read the last one."""
    engine.script = lambda request: [[50], [51], [52], [2]]
    num_read = 0

    async def pace(mailbox: Any) -> None:
        await until(lambda: engine.num_outputs == num_read)

    monkeypatch.setattr(engine, "_pace", pace)

    async def test(port: int) -> None:
        nonlocal num_read
        reader, writer = await send(port, "/v1/completions", {"prompt": "Hi", "stream": True})
        while b"[DONE]" not in (line := await reader.readline()):
            if line.startswith(b"data: "):
                num_read += 1
        assert num_read == 4
        writer.close()

    serve(test)


def test_slow_reader_gets_everything_merged(serve: Any, engine: Any, text_model: Any) -> None:
    """A client that does not read holds up nobody, and costs no memory: what piles up is merged into one event."""
    num_tokens = 6000  # about 1 MB of events, ten times what the buffers between the two take
    settings = {name: getattr(engine.info, name) for name in engine.info.__struct_fields__}
    engine.info = type(engine.info)(**{**settings, "max_model_len": 10**6})
    engine.paced, engine.script = False, lambda request: [*([[50]] * (num_tokens if request.id == 0 else 3)), [2]]

    async def test(port: int) -> None:
        body = {"prompt": "Hi", "stream": True, "max_tokens": 10**5}
        reader, _slow_writer = await send(port, "/v1/completions", body)
        await until(lambda: engine.submitted and engine.num_open == 0)
        quick, _quick_writer = await send(port, "/v1/completions", {"prompt": "Hi"})
        assert b"200 OK" in await quick.readline()
        raw = b""
        while b"data: [DONE]\n\n" not in raw[-100:]:
            data = await reader.read(1 << 16)
            assert data, "the server closed the connection"
            raw += data
        letter = text_model.tokenizer.token_bytes(50).decode()
        events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == letter * num_tokens
        assert len(events) < num_tokens // 2

    serve(test)


def test_leaving_without_ever_reading_aborts(serve: Any, engine: Any) -> None:
    """The server is stuck in a send then, not waiting for the engine."""
    engine.paced, engine.delay, engine.script = False, 0.0005, lambda request: [[50]] * 10**5

    async def test(port: int) -> None:
        settings = {name: getattr(engine.info, name) for name in engine.info.__struct_fields__}
        engine.info = type(engine.info)(**{**settings, "max_model_len": 10**6})
        _, writer = await send(port, "/v1/completions", {"prompt": "Hi", "stream": True, "max_tokens": 10**5})
        await until(lambda: engine.num_outputs > 1500)
        writer.transport.abort()
        await until(lambda: engine.aborted == [0])

    serve(test)


def test_pings_when_asked(engine: Any, text_model: Any) -> None:
    from vserve.server.app import create_app
    from vserve.server.options.config import ServerConfig

    assert ServerConfig().sse_ping_interval == 0
    app = create_app(engine, ServerConfig(sse_ping_interval=0.05), text_model)
    engine.delay = 0.12
    import httpx

    async def main() -> bytes:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return (await http.post("/v1/completions", json={"prompt": "Hi", "stream": True})).content

    raw = asyncio.run(main())
    assert raw.count(b": ping") >= 2 and b"\r" not in raw
