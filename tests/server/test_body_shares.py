"""The room for bodies is shared: uploads of one client that never end, over real sockets, beside another's request."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from vserve.server.app import create_app
from vserve.server.http import body_limit
from vserve.server.http.tenant import tenant_of
from vserve.server.http.uvicorn_options import uvicorn_options
from vserve.server.options.config import ServerConfig

SIZE = 256 << 10  # bytes of the largest body: eight have room
A, B = "127.0.0.1", "127.0.0.2"


class Client:
    def __init__(self, port: int) -> None:
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    async def upload(self, size: int, held_back: int, address: str = A, key: str = "") -> asyncio.StreamReader:
        """A completion of so many bytes, the last of which do not come."""
        content = json.dumps({"prompt": "Hello", "max_tokens": 1})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n"
        )
        head += f"authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self.writers.append(writer)
        writer.write((head + content.ljust(size)[: size - held_back]).encode())
        await writer.drain()
        return reader


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any], str]:
    """(status, body, head), when it comes."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line[16:]) for line in head.splitlines() if line.startswith("content-length:"))
    return int(head.split()[1]), json.loads(await reader.readexactly(length)), head


@pytest.fixture
def serve(engine: Any, text_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(body_limit, "AT_LEAST", 0)

    def run(test: Callable[[Client, Any], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            config = ServerConfig(max_body_size=SIZE, **options)
            app = create_app(engine, config, text_model)
            listener = socket.create_server(("127.0.0.1", 0))
            settings = uvicorn_options(config, lambda reason: None)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off", **settings))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            client = Client(listener.getsockname()[1])
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                await asyncio.wait_for(test(client, app), 60)
            finally:
                for writer in client.writers:
                    writer.close()
                server.should_exit = server.force_exit = True
                await serving

        asyncio.run(main())

    return run


@pytest.mark.parametrize("by", ["key", "address"])
def test_34_uploads_one_byte_short_keep_nobody_else_out(serve: Any, by: str) -> None:
    who = {"key": ({"key": "sk-a"}, {"key": "sk-b"}), "address": ({"address": A}, {"address": B})}
    one, other = who[by]

    async def test(client: Client, app: Any) -> None:
        held = [await client.upload(SIZE, 1, **one) for _ in range(34)]
        refused = [asyncio.create_task(answer(reader)) for reader in held]
        while sum(task.done() for task in refused) < 34 - 7:  # all but what one may have
            await asyncio.sleep(0.01)
        uploads = [await client.upload(90_000, 0, **other) for _ in range(3)]
        big = [await client.upload(SIZE, 1, **other) for _ in range(3)]
        for reader in uploads:
            status, body, _ = await answer(reader)
            assert status == 200, body
        while sum(task.done() for task in refused) < 34 - 7 + 2:  # they gave way
            await asyncio.sleep(0.01)
        assert not any(reader._buffer for reader in big)  # type: ignore[attr-defined]
        for task in refused:
            if task.done():
                status, body, head = task.result()
                assert status == 429 and body["error"]["code"] == "too_many_bodies" and "retry-after: 1" in head
                assert "connection: close" in head and f"may have {7 * SIZE}" in body["error"]["message"]
            task.cancel()
        assert app.state.server.metrics.rejected_requests["bodies"] >= 29

    serve(test, **({"api_key": ("sk-a", "sk-b")} if by == "key" else {}))


def test_an_upload_that_has_gone_silent_gives_way_to_its_own_kind(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy all are one address."""

    async def test(client: Client, app: Any) -> None:
        held = [await client.upload(SIZE, 1) for _ in range(7)]
        limit_full = await client.upload(90_000, 0)
        assert (await answer(limit_full))[0] == 429
        monkeypatch.setattr(body_limit, "SILENT", 0.0)
        status, body, _ = await answer(await client.upload(90_000, 0))
        assert status == 200, body
        assert (await answer(held[0]))[0] == 429, "of which nothing came for longest"
        assert not held[1]._buffer  # type: ignore[attr-defined]

    serve(test)


def test_who_tenants_are() -> None:
    def of(address: str | None, **state: Any) -> int:
        return tenant_of({"client": address and (address, 1), "state": state, "headers": [(b"x-vserve-tenant", b"7")]})

    assert of("1.2.3.4") == of("::ffff:1.2.3.4") != of("1.2.3.5") and 0 < of("1.2.3.4") < 1 << 63
    assert of("2001:db8::1") == of("2001:db8::ffff:1") != of("2001:db8:0:1::1")
    assert of(None) == 0 and of("not an address") == of("not an address")
    assert of(None, forwarded=True) == 7, "another API process has said so"
