"""What browsers may do, and that nobody else pays for it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from vserve.engine.errors import ConfigError
from vserve.server.app import create_app
from vserve.server.http.middleware import Cors
from vserve.server.options.config import ServerConfig


def get(app: Any, method: str = "GET", path: str = "/version", **headers: str) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return await http.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})

    return asyncio.run(main())


def test_origins_methods_headers_and_credentials(engine: Any, text_model: Any) -> None:
    config = ServerConfig(
        allowed_origins='["https://good.example"]', allowed_methods='["GET"]', allowed_headers='["x-own"]',
        allow_credentials=True,
    )  # fmt: skip
    app = create_app(engine, config, text_model)
    good, bad = get(app, origin="https://good.example"), get(app, origin="https://bad.example")
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert good.headers["access-control-allow-credentials"] == "true"
    assert "access-control-allow-origin" not in bad.headers and bad.status_code == 200
    asks = {"origin": "https://good.example", "access_control_request_method": "GET"}
    assert get(app, "OPTIONS", **asks, access_control_request_headers="x-own").status_code == 200
    assert get(app, "OPTIONS", **asks, access_control_request_headers="x-other").status_code == 400
    assert get(app, "OPTIONS", origin="https://good.example", access_control_request_method="POST").status_code == 400
    assert "Origin" in get(app).headers["vary"]  # for caches in between


def test_everything_is_allowed_by_default(engine: Any, text_model: Any) -> None:
    answer = get(create_app(engine, ServerConfig(), text_model), origin="https://any.example")
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("value", ["*", "[1]", '{"a": 1}', "["])
def test_a_list_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins .* JSON list"):
        ServerConfig(allowed_origins=value)


def test_without_an_origin_nothing_stands_between_a_stream_and_the_socket() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(send)

    async def send(message: Any) -> None: ...

    async def receive() -> Any: ...

    scope = {"type": "http", "method": "GET", "headers": [(b"host", b"x")]}
    asyncio.run(Cors(app, allow_origins=["*"])(scope, receive, send))
    assert seen == [send]
