"""Headers of one connection stay there, whoever passes a message on."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from vserve.server import colleagues
from vserve.server.router.app import RouterApp
from vserve.server.router.backend import Backends
from vserve.server.router.body import Body

HEADERS = [
    (b"connection", b"keep-alive, X-Hop"), (b"x-hop", b"1"), (b"keep-alive", b"timeout=5"), (b"connection", b"x-two"),
    (b"X-Two", b"2"), (b"proxy-connection", b"keep-alive"), (b"x-kept", b"3"), (b"accept", b"*/*"),
]  # fmt: skip
SCOPE = {"method": "GET", "path": "/v1/models", "headers": HEADERS, "state": {"request_id": "id"}}


def by_router(http: httpx.AsyncClient) -> list[tuple[bytes, bytes]]:
    backends = Backends(["http://a"], http, api_key=None, interval=1, cache_tokens=1024)
    return RouterApp(backends, http)._headers(SCOPE)


def by_colleague(http: httpx.AsyncClient) -> list[tuple[bytes, bytes]]:
    return colleagues._request(SCOPE, [b""]).headers.raw


def back_from_colleague(http: httpx.AsyncClient) -> list[tuple[bytes, bytes]]:
    return colleagues._start(httpx.Response(200, headers=HEADERS))["headers"]


@pytest.mark.parametrize("passing", [by_router, by_colleague, back_from_colleague])
def test_what_is_for_one_connection_goes_no_further(passing) -> None:
    names = {name.lower() for name, _ in passing(httpx.AsyncClient())}
    assert names >= {b"x-kept", b"accept"}
    assert not names & {b"connection", b"keep-alive", b"proxy-connection", b"x-hop", b"x-two"}


def test_an_answer_passes_the_router_without_them() -> None:
    async def first() -> list[tuple[bytes, bytes]]:
        http = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(
            200, headers=HEADERS, stream=_Nothing())))  # fmt: skip
        backends = Backends(["http://a"], http, api_key=None, interval=1, cache_tokens=1024)
        begun, _ = await RouterApp(backends, http)._first(backends.each[0], SCOPE, Body(b"", None))
        return begun.headers

    assert {name.lower() for name, _ in asyncio.run(first())} == {b"x-kept", b"accept"}


class _Nothing(httpx.AsyncByteStream):
    async def __aiter__(self):
        yield b""
