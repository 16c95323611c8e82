"""Servers that do what a test says, behind a router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from vserve.server.http.middleware import HttpMetrics, RequestMiddleware
from vserve.server.router.app import RouterApp
from vserve.server.router.backend import Backends

URLS = ("http://a:8000", "http://b:8000")
STREAM = {"content-type": "text/event-stream"}


class Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        self.closed = True


async def _whole(content: bytes) -> AsyncIterator[bytes]:
    yield content


class Fleet:
    """Servers by name; each answers as its function says, and everything else as a healthy server does."""

    def __init__(self, hosts: str = "ab", **servers: Callable[[httpx.Request], Any]) -> None:
        """`hosts`: the servers' names, a letter each."""
        self.looks: Callable[[str, str], None] = lambda name, path: None  # at questions, and may raise
        self.servers = servers
        self.asked: list[str] = []  # names of servers, of requests that are no questions after health
        self.requests: list[httpx.Request] = []
        self.down: set[str] = set()
        self.models: dict[str, list[str]] = {host: ["m"] for host in hosts}
        self.lengths: dict[str, int] = {}  # of their contexts
        self.locked: set[str] = set()  # who tells nobody of its models
        self.http = httpx.AsyncClient(transport=httpx.MockTransport(self._handle), trust_env=False)
        urls = [f"http://{host}:8000" for host in hosts]
        self.backends = Backends(urls, self.http, api_key="own", interval=0.01, cache_tokens=1 << 20)
        self.app = RouterApp(self.backends, self.http)
        self.door = RequestMiddleware(self.app, HttpMetrics())

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        name, path = request.url.host, request.url.path
        if name in self.down:
            raise httpx.ConnectError("refused")
        self.looks(name, path)
        if path == "/health":
            return httpx.Response(200)
        if path == "/v1/models" and name in self.locked:
            return httpx.Response(401, json={"error": {"code": "invalid_api_key"}})
        if path == "/v1/models":
            length = {"max_model_len": self.lengths[name]} if name in self.lengths else {}
            cards = [{"id": model, "of": name, **length} for model in self.models[name]]
            return httpx.Response(200, json={"data": cards})
        self.asked.append(name)
        self.requests.append(request)
        answer = self.servers[name](request) if name in self.servers else httpx.Response(200, json={"from": name})
        found = await answer if asyncio.iscoroutine(answer) else answer
        assert isinstance(found, httpx.Response)
        if isinstance(found.stream, Pieces):
            return found
        return httpx.Response(found.status_code, headers=found.headers, stream=Pieces(_whole(found.content)))

    async def ready(self) -> Fleet:
        self.watching = asyncio.create_task(self.backends.watch())
        while len(self.backends.serving) < len(self.models) - len(self.down):
            await asyncio.sleep(0.005)
        return self

    async def call(
        self, path: str = "/v1/completions", body: Any = None, method: str = "POST",
        headers: dict[str, str] | None = None, raw: bytes | None = None, sent: list[Any] | None = None,
        leave: asyncio.Event | None = None,
    ) -> tuple[int, bytes]:  # fmt: skip
        """→ (status, body); `raw`: in place of `body`; `sent` sees the messages as they are sent, `leave` is when the
        client goes."""
        messages: list[Any] = [] if sent is None else sent
        if raw is None:
            raw = b"" if method == "GET" else json.dumps(body if body is not None else {"prompt": "hello"}).encode()
        incoming: list[Any] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)

        path, _, query = path.partition("?")
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [
                (name.encode(), value.encode())
                for name, value in ({"content-type": "application/json"} | (headers or {})).items()
            ],
        }  # fmt: skip
        await self.door(scope, receive, send)
        if not messages:
            return 0, b""
        return messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))
