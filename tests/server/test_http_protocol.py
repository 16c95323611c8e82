"""The connection's own clocks, over Unix sockets, where the kernel has none."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from vserve.server.config import ServerConfig
from vserve.server.http_protocol import uvicorn_options

HUGE = b"x" * (8 << 20)


async def application(scope: Any, receive: Any, send: Any) -> None:
    length = (b"content-length", b"%d" % len(HUGE)) if scope["path"] == "/huge" else (b"content-length", b"2")
    if scope["path"] == "/echo":
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            scope["app_left"].append(True)
            return
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    if scope["path"] == "/huge":
        for _ in range(8):
            await send({"type": "http.response.body", "body": HUGE[: 1 << 20], "more_body": True})
        await send({"type": "http.response.body"})
    else:
        await send({"type": "http.response.body", "body": b"ok"})


def run(tmp_path: Path, test: Any, app: Any = application, **options: Any) -> Counter[str]:
    """Runs `await test(path)` against a server on a Unix socket; returns what it refused."""
    refused: Counter[str] = Counter()
    path = tmp_path / "socket"

    async def main() -> None:
        config = ServerConfig(**options)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        settings = uvicorn_options(config, lambda reason: refused.update([reason]))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off", **settings))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(test(str(path)), 60)
        finally:
            server.should_exit = server.force_exit = True
            await serving

    asyncio.run(main())
    return refused


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def test_row_30_a_client_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.write(get("/huge"))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1.5)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await reader.read()) < len(HUGE)

    assert run(tmp_path, test, write_timeout=0.5)["stalled_reader"] == 1


def test_row_30_a_slow_client_gets_everything(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 16)
        writer.write(get("/huge"))
        size = 0
        while size < len(HUGE):
            size += len(await reader.read(1 << 17))
            await asyncio.sleep(0.01)
        writer.close()

    assert not run(tmp_path, test, write_timeout=3.0)


def test_row_30_an_answer_is_not_kept_for_who_never_fetches_it(tmp_path: Path) -> None:
    """The application is done; only bytes are left."""

    async def small(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(HUGE))]})
        await send({"type": "http.response.body", "body": HUGE})

    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.write(get("/").replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1.5)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await reader.read()) < len(HUGE)

    assert run(tmp_path, test, small, write_timeout=0.5)["stalled_reader"] == 1


def test_an_idle_connection_is_kept_and_then_closed(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        for pause in (0.0, 0.3, 0.3):
            await asyncio.sleep(pause)
            writer.write(get("/"))
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""

    assert not run(tmp_path, test, timeout_keep_alive=1.0, header_timeout=0.5)


def test_a_body_that_nobody_wants_is_read_when_it_is_small(tmp_path: Path) -> None:
    """Answered before the body came: the connection can be used again."""

    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % 5000)
        await reader.readuntil(b"ok")
        writer.write(b"x" * 5000 + get("/"))
        await reader.readuntil(b"ok")
        writer.write(head % (2 << 20))
        assert (await reader.read()).endswith(b"ok")  # too much to wait for

    assert not run(tmp_path, test)


def test_the_application_hears_of_a_body_that_ends_too_early(tmp_path: Path) -> None:
    left: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app_left"] = left
        await application(scope, receive, send)

    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")
        assert b" 408 " in await reader.read()
        await until(lambda: left)

    assert run(tmp_path, test, app, body_timeout=0.5)["slow_request"] == 1


@pytest.mark.parametrize("garbage", [b"\x00", b"BAD\r\n\r\n"])
def test_garbage_behind_a_request_does_not_cost_its_answer(tmp_path: Path, garbage: bytes) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(get("/") + garbage)
        data = await reader.read()
        assert data.startswith(b"HTTP/1.1 200") and b"okHTTP/1.1 400" in data
        assert b"connection: close" in data

    assert run(tmp_path, test)["malformed_request"] == 1


def test_who_is_idle_longest_makes_room_and_who_is_busy_does_not(tmp_path: Path) -> None:
    release = asyncio.Event()
    num_waiting = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_waiting
        if scope["path"] == "/wait":
            num_waiting += 1
            await release.wait()
        await application(scope, receive, send)

    async def test(path: str) -> None:
        held = []  # a writer that nobody holds is closed

        async def connect(request: bytes = b"") -> asyncio.StreamReader:
            reader, writer = await asyncio.open_unix_connection(path)
            held.append(writer)
            writer.write(request)
            return reader

        busy = [await connect(get("/wait")) for _ in range(2)]
        kept = await connect(get("/"))
        await kept.readuntil(b"ok")
        silent = await connect()
        busy.append(await connect(get("/wait")))
        assert await silent.read() == b""  # it had not asked for anything yet
        busy.append(await connect(get("/wait")))
        assert await kept.read() == b""
        await until(lambda: num_waiting == 4)
        assert b" 503 " in await (await connect()).read()  # all others are at work
        release.set()
        for reader in busy:
            await reader.readuntil(b"ok")

    refused = run(tmp_path, test, app, max_connections=4)
    assert refused == {"evicted_connection": 2, "too_many_connections": 1}
