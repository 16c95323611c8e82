"""The router, before servers that do what the test says."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from vserve.server.client.routing import prefix_keys
from vserve.server.http.auth import Locks
from vserve.server.http.middleware import HttpMetrics, RequestMiddleware
from vserve.server.lanes import Lanes
from vserve.server.options.config import ServerConfig
from vserve.server.router import asked as asked_module
from vserve.server.router import backend as backend_module
from vserve.server.router.app import RouterApp
from vserve.server.router.asked import asked_of, read
from vserve.server.router.service import RouterService, guarded

from .fleet import STREAM, URLS, Fleet, Pieces, run


def test_a_stream_is_passed_on_as_it_comes_and_with_what_was_sent() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await go_on.wait()
            yield b"data: 2\n\n"

        stream = lambda request: httpx.Response(200, headers=STREAM, stream=Pieces(pieces()))  # noqa: E731
        fleet = await Fleet(a=stream, b=stream).ready()
        sent: list[Any] = []
        calling = asyncio.create_task(
            fleet.call("/v1/completions?x=1", headers={"authorization": "Bearer me"}, sent=sent)
        )
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        assert sent[1]["body"] == b"data: 1\n\n" and not calling.done(), "nothing is kept back"
        assert fleet.backends.each[URLS.index(f"http://{fleet.asked[0]}:8000")].num_open == 1
        go_on.set()
        assert await calling == (200, b"data: 1\n\ndata: 2\n\n")
        (request,) = fleet.requests
        assert request.headers["authorization"] == "Bearer me" and request.url.query == b"x=1"
        ids = [value for name, value in sent[0]["headers"] if name == b"x-request-id"]
        assert ids == [request.headers["x-request-id"].encode()], "one id, from the client to the server"
        assert all(not backend.num_open and not backend.waiting_tokens for backend in fleet.backends.each)

    run(test)


async def _dies_at_once() -> AsyncIterator[bytes]:
    raise httpx.ReadError("reset")
    yield b""


async def _breaks_off() -> AsyncIterator[bytes]:
    yield b'{"error": {'
    raise httpx.ReadError("reset")


def _refuses(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def _cuts(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, headers=STREAM, stream=Pieces(_dies_at_once()))


def _says(status: int, code: str | None = None) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(status, json={"error": {"code": code, "message": "It says no."}})


# What happens at a server, why another is asked in the metrics' words, the status where it happens at all of them.
FAILURES: dict[str, tuple[Callable[[httpx.Request], httpx.Response], str, int]] = {
    "refused": (_refuses, "connection", 503),
    "no byte": (_cuts, "connection", 502),
    "half a refusal": (lambda request: httpx.Response(503, stream=Pieces(_breaks_off())), "connection", 502),
    "loading": (_says(503, "loading"), "status_503", 503),
    "full": (_says(429, "queue_full"), "status_429", 429),
    "dead": (_says(503, "engine_dead"), "status_503", 503),
    "gateway": (_says(502), "status_502", 502),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_before_the_first_byte_another_server_is_asked(failure: str) -> None:
    async def test() -> None:
        fails, reason, last = FAILURES[failure]
        fleet = await Fleet(a=fails).ready()
        fleet.backends._router._sessions[hash("s")] = 0
        status, body = await fleet.call(headers={"x-session-id": "s"})
        assert (status, json.loads(body)) == (200, {"from": "b"}) and fleet.asked == ["a", "b"]
        assert fleet.app.metrics.retries == {(URLS[0], reason): 1}
        fleet.servers["b"] = fails
        fleet.backends.each[0].takes = True
        status, body = await fleet.call(headers={"x-session-id": "s"})
        assert status == last and b"error" in body, "all have failed: the last refusal, or that nobody answers"

    run(test)


@pytest.mark.parametrize(
    "refusal", [(400, "invalid"), (401, "key"), (404, "model_not_found"), (429, "key_requests_per_minute"), (500, "x")]
)
def test_what_another_server_would_say_too_is_the_answer(refusal: tuple[int, str]) -> None:
    async def test() -> None:
        status, code = refusal
        answer = lambda request: httpx.Response(status, json={"error": {"code": code}})  # noqa: E731
        fleet = await Fleet(a=answer, b=answer).ready()
        assert (await fleet.call())[0] == status and len(fleet.asked) == 1

    run(test)


@pytest.mark.parametrize("headers", [STREAM, {"content-type": "application/json"}])
def test_what_has_begun_is_nobody_else_s(headers: dict[str, str]) -> None:
    async def test() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1"
            raise httpx.ReadError("reset")

        breaks = lambda request: httpx.Response(200, headers=headers, stream=Pieces(pieces()))  # noqa: E731
        fleet = await Fleet(a=breaks, b=breaks).ready()
        if headers is STREAM:
            status, body = await fleet.call()
            assert status == 200 and body.startswith(b"data: 1\n\ndata: {") and body.endswith(b"data: [DONE]\n\n")
            assert b"server_lost" in body
        else:
            sent: list[Any] = []
            with pytest.raises(httpx.ReadError):  # uvicorn then closes the connection
                await fleet.call(sent=sent)
            assert sent[-1]["more_body"]
        assert len(fleet.asked) == 1 and sum(fleet.app.metrics.broken.values()) == 1

    run(test)


def test_a_server_that_falls_silent_loses_what_it_has_not_begun() -> None:
    async def test() -> None:
        hangs = lambda request: asyncio.Event().wait()  # noqa: E731
        fleet = await Fleet(a=hangs).ready()
        fleet.backends._router._sessions[hash("s")] = 0
        calling = asyncio.create_task(fleet.call(headers={"x-session-id": "s"}))
        while not fleet.asked:
            await asyncio.sleep(0.001)
        fleet.down.add("a")
        assert (await calling)[0] == 200 and fleet.asked == ["a", "b"]
        assert [backend.url for backend in fleet.backends.serving] == [URLS[1]]
        assert (await fleet.call("/health", method="GET"))[0] == 200
        fleet.down.add("b")
        while fleet.backends.serving:
            await asyncio.sleep(0.001)
        assert (await fleet.call("/health", method="GET"))[0] == 503
        assert (await fleet.call())[0] == 503
        fleet.down.clear()
        while len(fleet.backends.serving) < 2:
            await asyncio.sleep(0.001)
        assert (await fleet.call("/readyz", method="GET"))[0] == 200

    run(test)


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_question_that_fails_in_no_known_way_ends_no_asking(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        def fails(name: str, asked: str) -> None:
            if name == "a" and asked == path:
                raise RuntimeError("what nobody thought of")

        fleet = await Fleet().ready()
        fleet.looks = fails
        fleet.backends.each[0].models = None
        while fleet.backends.each[0].takes:
            await asyncio.sleep(0.005)
        fleet.down.add("b")
        while fleet.backends.each[1].takes:
            await asyncio.sleep(0.005)
        fleet.looks, fleet.down = lambda name, path: None, set()
        while len(fleet.backends.serving) < 2:
            await asyncio.sleep(0.005)
        assert not fleet.watching.done()
        assert [record.getMessage() for record in caplog.records if record.exc_info] == [f"asking {URLS[0]} failed"]

    run(test)


def test_servers_get_no_key_of_the_router_s_own() -> None:
    with socket.socket() as sock:
        config = ServerConfig(api_key=["for-clients"])
        for server_key, expected in ((None, {}), ("s", {"authorization": "Bearer s"})):
            service = RouterService([*URLS], config, sock, server_key=server_key, interval=1, cache_tokens=1024)
            assert service._backends._headers == expected


def test_when_the_client_leaves_the_server_hears_of_it() -> None:
    async def test() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()

        stream, leave, sent = Pieces(pieces()), asyncio.Event(), list[Any]()
        answers = lambda request: httpx.Response(200, headers=STREAM, stream=stream)  # noqa: E731
        fleet = await Fleet(a=answers, b=answers).ready()
        calling = asyncio.create_task(fleet.call(sent=sent, leave=leave))
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        leave.set()
        await calling
        assert stream.closed and not any(backend.num_open for backend in fleet.backends.each)

    run(test)


def test_prefixes_sessions_and_models_find_their_server() -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        for text in ("one " * 2000, "two " * 2000, "three " * 2000, "four " * 2000):
            before = len(fleet.asked)
            for turn in range(3):
                messages = [{"role": "user", "content": text}, {"role": "user", "content": str(turn)}]
                await fleet.call("/v1/chat/completions", {"model": "m", "messages": messages})
            assert len(set(fleet.asked[before:])) == 1, "who has the prefix"
        assert set(fleet.asked) == {"a", "b"}, "prompts that nobody knows are spread"
        fleet.asked.clear()
        for turn in range(4):
            await fleet.call(body={"prompt": f"{turn}" * 3000}, headers={"x-session-id": "me"})
        assert len(set(fleet.asked)) == 1
        fleet.models["b"], fleet.backends.each[1].models = ["other"], None
        while fleet.backends.each[1].models is None:
            await asyncio.sleep(0.001)
        fleet.asked.clear()
        for model in ("m", "other", "m", "other", "neither"):
            await fleet.call(body={"model": model, "prompt": "hi"})
        assert fleet.asked[:4] == ["a", "b", "a", "b"]
        answer = json.loads((await fleet.call("/v1/models", method="GET"))[1])
        assert [card["id"] for card in answer["data"]] == ["m", "other"]

    run(test)


def _has(model: str) -> Callable[[httpx.Request], httpx.Response]:
    """A server that has this model alone."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)["model"] if request.content else request.url.path.rsplit("/", 1)[-1]
        return httpx.Response(200 if asked == model else 404, json={"model": asked})

    return answer


def test_a_model_that_a_server_lacks_may_be_at_another() -> None:
    async def test() -> None:
        fleet = await Fleet(a=_has("m"), b=_has("new")).ready()
        for index, backend in enumerate(fleet.backends.each):
            fleet.backends._router._sessions[hash("s")] = index
            for _ in range(2):
                assert (await fleet.call(body={"model": "new"}, headers={"x-session-id": "s"}))[0] == 200, backend.url
                fleet.backends._router._sessions[hash("s")] = index
        assert fleet.asked == ["a", "b"] * 2 + ["b"] * 2, "an adapter that was loaded a moment ago"
        fleet.asked.clear()
        assert (await fleet.call(body={"model": "neither"}))[0] == 404 and sorted(fleet.asked) == ["a", "b"]
        fleet.asked.clear()
        fleet.servers["b"], fleet.backends._router._sessions[hash("s")] = _has("other"), 1
        assert (await fleet.call(body={"model": "m"}, headers={"x-session-id": "s"}))[0] == 404
        assert fleet.asked == ["b"], "all have said that they have it"

    run(test)


def test_one_model_is_asked_for_where_it_is() -> None:
    async def test() -> None:
        fleet = Fleet(a=_has("m"), b=_has("other"))
        fleet.models["b"] = ["other"]
        await fleet.ready()
        for _ in range(3):
            assert (await fleet.call("/v1/models/other", method="GET"))[0] == 200
        assert fleet.asked == ["b"] * 3

    run(test)


def test_who_has_the_model_and_is_full_says_more_than_who_lacks_it() -> None:
    async def test() -> None:
        full = lambda request: httpx.Response(429, json={"error": {"code": "queue_full"}})  # noqa: E731
        fleet = Fleet(a=full, b=_has("other"))
        fleet.models["b"] = ["other"]
        await fleet.ready()
        assert (await fleet.call(body={"model": "m"}))[0] == 429 and fleet.asked == ["a", "b"]

    run(test)


def test_servers_that_do_not_tell_of_their_models(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        fleet = Fleet(a=_has("m"), b=_has("other"))
        fleet.locked = {"a", "b"}
        await fleet.ready()
        for model in ("m", "other", "m", "other"):
            for index in (0, 1):
                fleet.backends._router._sessions[hash("s")] = index
                assert (await fleet.call(body={"model": model}, headers={"x-session-id": "s"}))[0] == 200
        await asyncio.sleep(0.05)  # some questions more
        said = [record.getMessage() for record in caplog.records if "--server-api-key" in record.getMessage()]
        assert sorted(line.split()[0] for line in said) == list(URLS), "once of each"

    run(test)


def test_models_of_servers_that_say_nothing_are_no_empty_list() -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        fleet.watching.cancel()
        fleet.down = {"a", "b"}  # and no question has noticed yet
        status, body = await fleet.call("/v1/models", method="GET")
        assert status == 503 and json.loads(body)["error"]["code"] == "no_answer"
        fleet.down, fleet.models = {"a"}, {"b": []}
        assert (await fleet.call("/v1/models", method="GET"))[0] == 200, "one that has none says so"

    run(test)


def test_what_one_server_made_is_asked_for_there() -> None:
    async def test() -> None:
        def server(name: str) -> Callable[[httpx.Request], httpx.Response]:
            def answer(request: httpx.Request) -> httpx.Response:
                if request.method == "GET" and not request.url.path.endswith(name):
                    return httpx.Response(404, json={"error": {}})
                return httpx.Response(200, json={"id": f"resp_{name}"})

            return answer

        fleet = await Fleet(a=server("a"), b=server("b")).ready()
        assert (await fleet.call("/v1/responses/resp_b", method="GET"))[0] == 200, "nobody knows whose: all are asked"
        assert (await fleet.call("/v1/responses/resp_c", method="GET"))[0] == 404
        fleet.asked.clear()
        made = json.loads((await fleet.call("/v1/responses", {"input": "hi"}))[1])["id"]
        for _ in range(5):
            await fleet.call("/v1/responses", {"input": "hi", "previous_response_id": made})
        await fleet.call(f"/v1/responses/{made}", method="GET")
        assert set(fleet.asked) == {made[-1]}

    run(test)


@pytest.mark.parametrize("path", [
    "/server_info", "/reload", "/scale_data_parallel", "/v1/load_lora_adapter", "/", "/ui/page.css", "/openapi.json",
])  # fmt: skip
def test_what_controls_a_server_is_not_passed_on(path: str) -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        status, body = await fleet.call(path)
        assert status == 404 and b"ask the server itself" in body and not fleet.asked

    run(test)


@pytest.mark.parametrize("path", ["/v1/../reload", "/v1/./x", "/v1/%2e%2e/reload", "/v1/..%2freload", "/v1/%252e./x"])
def test_a_path_with_dots_is_nobodys(path: str) -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        status, body = await fleet.call(path)
        assert status == 400 and b'"invalid_path"' in body and not fleet.asked

    run(test)


@pytest.mark.parametrize("path", ["/v1/requests/r/cancel", "/abort_request"])
def test_nobody_cancels_with_the_servers_key_who_has_shown_none(path: str) -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        for server_key, asks_for_keys, status in ((None, False, 200), ("s", True, 200), ("s", False, 403)):
            app = RouterApp(fleet.backends, fleet.http, server_key=server_key, asks_for_keys=asks_for_keys)
            fleet.door = RequestMiddleware(app, HttpMetrics())
            fleet.asked.clear()
            assert (await fleet.call(path, {"request_id": "r"}))[0] == status
            assert bool(fleet.asked) == (status == 200)

    run(test)


@pytest.mark.parametrize("is_named", [False, True])
def test_pages_of_others_have_nothing_done_with_the_servers_key(is_named: bool) -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        page = {"origin": "https://page.example"}
        for server_key, api_key, status in (
            (None, (), 200),
            ("s", (), 403),
            ("s", ("own",), 200),
            (None, ("own",), 200),
        ):
            config = ServerConfig(api_key=api_key, allowed_origins='["https://page.example"]' if is_named else None)
            app = RouterApp(fleet.backends, fleet.http, server_key=server_key, asks_for_keys=bool(api_key))
            fleet.door = guarded(app, config, Locks(config))
            fleet.asked.clear()
            sent: list[Any] = []
            found, _ = await fleet.call(headers={**page, "authorization": "Bearer own"}, sent=sent)
            assert found == (200 if is_named else status) and bool(fleet.asked) == (found == 200)
            judges = app.judges_origins
            allowed = [value for name, value in sent[0]["headers"] if name == b"access-control-allow-origin"]
            assert bool(allowed) == (judges and found == 200), "one of them says it, not both"
            if found == 200:
                assert ("origin" in fleet.requests[-1].headers) != judges
            assert (await fleet.call(headers={"authorization": "Bearer own"}))[0] == 200, "who is no page"

    run(test)


def test_keys_have_prefixes_and_sessions_of_their_own() -> None:
    """However the key is brought, before servers and before Ray Serve's replicas."""

    async def test() -> None:
        lanes, body = Lanes(1), json.dumps({"prompt": "x" * 1000}).encode()

        async def ask(by_key: bool = True, **headers: str) -> tuple[str | None, str]:
            every = {"content-type": "application/json", "x-session-id": "s"} | headers
            raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in every.items()]
            found = await asked_of(Request({"type": "http", "headers": raw}), body, lanes, by_key=by_key)
            return found.session, str(found.keys)

        each = [await ask(**headers) for headers in ({}, {"authorization": "Bearer a"}, {"authorization": "Bearer b"},
                                                     {"x_api_key": "a"}, {"x_api_key": "b"})]  # fmt: skip
        assert all(len(set(values)) == 5 for values in zip(*each, strict=True)), each
        assert await ask(by_key=False, x_api_key="a") == each[0]
        assert (await ask(**{"content-type": "text/plain"}))[1] == "[]"
        lanes.close()

    run(test)


def test_its_own_metrics() -> None:
    async def test() -> None:
        fleet = await Fleet(a=_refuses).ready()
        fleet.backends._router._sessions[hash("s")] = 0
        await fleet.call(headers={"x-session-id": "s"})
        page = (await fleet.call("/metrics", method="GET"))[1].decode()
        assert f'vserve_router_retries_total{{reason="connection",server="{URLS[0]}"}} 1.0' in page
        assert f'vserve_router_answers_total{{server="{URLS[1]}",status="2xx"}} 1.0' in page
        assert "vserve_router_time_to_first_byte_seconds_count 1.0" in page

    run(test)


@pytest.mark.parametrize("size", [1000, 300 << 10])
def test_keys_are_made_once_a_request_and_on_a_thread_where_it_is_large(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        made: list[bool] = []

        def keys(text: bytes, salt: str | None) -> list[int]:
            made.append(threading.current_thread() is threading.main_thread())
            return prefix_keys(text, salt)

        for module in (asked_module, backend_module):
            monkeypatch.setattr(module, "prefix_keys", keys, raising=False)
        fleet = await Fleet(a=_refuses).ready()
        fleet.backends._router._sessions[hash("s")] = 0
        status, _ = await fleet.call(body={"prompt": "x" * size}, headers={"x-session-id": "s"})
        assert status == 200 and fleet.asked == ["a", "b"] and made == [size < 2000]

    run(test)


def test_a_long_session_is_kept_as_a_number() -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        for _ in range(4):
            await fleet.call(headers={"x-session-id": "me" * 10_000})
        assert len(set(fleet.asked)) == 1 and all(isinstance(key, int) for key in fleet.backends._router._sessions)

    run(test)


def test_bodies_that_say_nothing_are_for_the_server_to_refuse() -> None:
    for body in (
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"model": 3, "prompt": null}',
        b"\xff",
        b"[" * 100_000,
        b'{"model": "\xff"}',
    ):
        assert (read(body).num_tokens, read(body).keys, read(body).model) == (0, [], None)
    tools, others, messages = (json.dumps([letter * 500]) for letter in "abc")
    one, other = (read(f'{{"messages": {messages}, "tools": {text}}}'.encode()).keys for text in (tools, others))
    assert one == read(f'{{"tools": {tools}, "messages": {messages}}}'.encode()).keys, "in the order of templates"
    assert len(one) == len(other) == 3 and one[0] != other[0], "tools first"
