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


ANY = '["*"]'
FOREIGN = ("https://any.example", "null", "http://localhost.any.example", "http://127.0.0.1@any.example", "http://y",
           "http://x.any.example", "https://x:1")  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"api_key": ("key",)}, {"allowed_origins": ANY}, {"allowed_origins": ANY, "admin_api_key": ("admin",)}]
)
def test_any_origin_is_allowed_where_a_key_is_needed_or_told_to(engine: Any, text_model: Any, options: Any) -> None:
    app = create_app(engine, ServerConfig(**options), text_model)
    for origin in FOREIGN:
        assert get(app, origin=origin).headers["access-control-allow-origin"] == "*"
        assert get(app, "POST", "/tokenize", origin=origin).status_code in (401, 415)


@pytest.mark.parametrize(
    "options", [{}, {"admin_api_key": ("admin",)}, {"allowed_origins": '["https://good.example"]'}]
)
def test_without_keys_pages_of_others_change_nothing(engine: Any, text_model: Any, options: Any) -> None:
    """A POST without a body, or a plain one, is sent by browsers before anybody is asked."""
    app = create_app(engine, ServerConfig(**options), text_model)
    app.state.server.reloads["seen"] = lambda: reloaded.append(1)
    reloaded: list[int] = []
    for origin in FOREIGN:
        for method, path in (("POST", "/reload"), ("POST", "/v1/chat/completions"), ("DELETE", "/v1/responses/a")):
            refused = get(app, method, path, origin=origin, authorization="Bearer admin", sec_fetch_site="cross-site")
            assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
            error = refused.json()["error"]
            assert error["code"] == "origin_not_allowed" and "--allowed-origins" in error["message"]
        answer = get(app, origin=origin)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
        ask = {"origin": origin, "access_control_request_method": "POST"}
        assert get(app, "OPTIONS", "/v1/chat/completions", **ask).status_code == 400
    assert not reloaded
    home = ["https://good.example"] if "allowed_origins" in options else LOCAL
    for headers in [{}, {"origin": "http://x"}, *({"origin": origin} for origin in home),
                    {"origin": "https://proxy.example", "sec_fetch_site": "same-origin"}]:  # fmt: skip
        assert get(app, "POST", "/reload", authorization="Bearer admin", **headers).status_code == 200, headers
    for origin in home:
        assert get(app, origin=origin).headers["access-control-allow-origin"] == origin
    assert len(reloaded) == 3 + len(home)


@pytest.mark.parametrize(
    ("host", "is_public"),
    [("rebound.example:8000", True), ("rebound.example", True), ("1.2.3.4.example.", True), ("local.example", True),
     ("1.2.ip6.arpa", True), ("vserve:8000", False), ("gpu1.local:8000", False), ("llm.svc.cluster.local", False),
     ("app.localhost:1", False), ("10.0.0.5:8000", False), ("[fe80::1]:8000", False), ("LOCALHOST", False)],
)  # fmt: skip
def test_a_name_that_anybody_may_own_does_not_make_a_page_this_servers_own(
    engine: Any, text_model: Any, host: str, is_public: bool
) -> None:
    """It may be pointed here when the page is open already. Who is no browser sends no origin, and calls the server as
    he likes."""
    app = create_app(engine, ServerConfig(), text_model)
    page = {"host": host, "origin": f"http://{host}"}
    assert get(app, "POST", "/reload", **page).status_code == (403 if is_public else 200)
    assert get(app, "POST", "/reload", host=host).status_code == 200
    assert get(app, "POST", "/reload", **page, sec_fetch_site="same-origin").status_code == 200
    named = create_app(engine, ServerConfig(allowed_origins=f'["http://{host}"]'), text_model)
    assert get(named, "POST", "/reload", **page).status_code == 200


LOCAL = ["http://localhost:3000", "http://localhost", "https://127.0.0.1:8443", "http://[::1]:1", "http://127.1.2.3"]


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
    asyncio.run(Cors(app, origins=["*"], needs_keys=False)(scope, receive, send))
    assert seen == [send]
