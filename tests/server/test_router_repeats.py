"""What becomes of a request that one of the servers behind the router did not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import httpx
import pytest

from vserve.server.router import asked
from vserve.server.router import backend as backend_module

from .fleet import STREAM, Fleet, Pieces, run

Server = Callable[[httpx.Request], httpx.Response]


async def _nothing() -> AsyncIterator[bytes]:
    raise httpx.ReadError("reset")
    yield b""


def breaks(request: httpx.Request) -> httpx.Response:
    """The connection, once the request has been sent."""
    return httpx.Response(200, headers=STREAM, stream=Pieces(_nothing()))


def refuses(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def says(status: int, code: str | None, message: str = "It says no.") -> Server:
    return lambda request: httpx.Response(status, json={"error": {"code": code, "message": message}})


def as_anthropic(status: int, code: str) -> Server:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "It says no."}}
    return lambda request: httpx.Response(status, json=error, headers={"x-error-code": code})


DEAD = says(503, "engine_dead")
TOO_LONG = says(400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "first", "second", "status", "code"),
    [
        ("/v1/completions", DEAD, DEAD, 503, "engine_dead"),
        ("/v1/messages", as_anthropic(503, "engine_dead"), as_anthropic(503, "engine_dead"), 503, None),
        ("/v1/completions", breaks, breaks, 502, "server_lost"),
        ("/v1/completions", DEAD, breaks, 502, "server_lost"),
        ("/v1/completions", breaks, DEAD, 503, "engine_dead"),
        ("/v1/completions", says(502, None), says(504, None), 504, None),
    ],
)
def test_a_request_takes_down_two_servers_at_most(
    path: str, first: Server, second: Server, status: int, code: str | None
) -> None:
    async def test() -> None:
        fleet = await Fleet("abcd", a=first, b=second, c=second, d=second).ready()
        found, body = await fleet.call(path)
        assert fleet.asked == ["a", "b"]
        assert (found, json.loads(body)["error"].get("code")) == (status, code)
        assert sum(fleet.app.metrics.retries.values()) == 1, "it went on once"

    run(test)


def test_servers_where_nothing_has_begun_are_all_tried() -> None:
    async def test() -> None:
        names = "abcdefg"
        fleet = await Fleet(
            names, a=refuses, b=says(503, "server_shutting_down"), c=says(429, "queue_full"), d=DEAD,
            e=says(503, "model_loading"), f=refuses,
        ).ready()  # fmt: skip
        status, body = await fleet.call()
        assert (status, json.loads(body)) == (200, {"from": "g"}) and fleet.asked == list(names)

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "body", "is_repeated"),
    [
        ("POST", "/v1/responses", {"input": "x"}, False),
        ("POST", "/v1/responses", {"input": "x", "store": False}, True),
        ("POST", "/v1/responses", {"input": "x", "store": False, "background": True}, False),
        ("POST", "/v1/responses/input_tokens", {"input": "x"}, True),
        ("POST", "/v1/chat/completions", {"messages": []}, True),
        ("POST", "/v1/chat/completions", {"messages": [], "store": True}, False),
        ("POST", "/invocations", {"messages": [], "store": True}, False),
        ("GET", "/v1/responses/resp_x", None, True),
    ],
)
def test_what_may_have_been_stored_is_not_asked_for_again(method: str, path: str, body: Any, is_repeated: bool) -> None:
    async def test() -> None:
        fleet = await Fleet(a=breaks).ready()
        status, said = await fleet.call(path, body, method)
        assert (status, fleet.asked) == ((200, ["a", "b"]) if is_repeated else (502, ["a"]))
        if not is_repeated:
            error = json.loads(said)["error"]
            assert error["code"] == "server_lost" and "may have been made and stored" in error["message"]
        for nothing_begun in (refuses, DEAD, says(429, "queue_full")):
            fleet = await Fleet(a=nothing_begun).ready()
            assert (await fleet.call(path, body, method))[0] == 200 and fleet.asked == ["a", "b"]

    run(test)


class Keeper:
    """A server that makes responses' ids as vserve does, and stores them."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self._numbers = count()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        previous = body.get("previous_response_id")
        if request.method == "GET":
            id = request.url.path.rsplit("/")[-1]
            return httpx.Response(200 if id in self.stored else 404, json={"error": {"code": "not_found"}, "id": id})
        if previous is not None and previous not in self.stored:
            return says(400, "previous_response_not_found")(request)
        id = self._id(request)
        self.stored.add(id)
        return httpx.Response(200, json={"id": id, **body})

    def _id(self, request: httpx.Request) -> str:
        return f"resp_{request.headers['x-server-tag']}{next(self._numbers):032x}"


class Other(Keeper):
    """One that knows nothing of tags."""

    def _id(self, request: httpx.Request) -> str:
        return f"resp_{id(self):x}{next(self._numbers):016x}"


def test_a_response_s_id_tells_every_router_which_server_has_it() -> None:
    async def test() -> None:
        servers = {name: Keeper() for name in "abcd"}
        made: dict[str, str] = {}
        for name in servers:
            fleet = await Fleet("abcd", **servers).ready()
            fleet.down = {other for other in servers if other != name}
            fleet.asked.clear()
            status, answer = await fleet.call("/v1/responses", {"input": "x"}, headers={"x-server-tag": "00000000"})
            assert status == 200
            made[name] = json.loads(answer)["id"]
        assert not any("00000000" in id[:13] for id in made.values()), "a client's own is not passed on"
        for hosts in ("abcd", "dbcaz"):  # other routers, the second with another list
            for name, id in made.items():
                fleet = await Fleet(hosts, **servers, z=Keeper()).ready()
                assert (await fleet.call("/v1/responses", {"input": "y", "previous_response_id": id}))[0] == 200
                assert (await fleet.call(f"/v1/responses/{id}", method="GET"))[0] == 200
                assert fleet.asked == [name, name]
        fleet = await Fleet("bcd", b=Keeper(), c=Keeper(), d=servers["a"]).ready()  # it is called otherwise now
        assert (await fleet.call("/v1/responses", {"input": "y", "previous_response_id": made["a"]}))[0] == 200
        assert fleet.asked == ["b", "c", "d"], "all are asked"
        status, answer = await fleet.call("/v1/responses", {"input": "y", "previous_response_id": "resp_nobodys"})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "previous_response_not_found")

    run(test)


def test_requests_and_chats_have_it_too_unless_the_client_names_them() -> None:
    async def test() -> None:
        fleet = await Fleet(a=DEAD, b=lambda request: httpx.Response(200, json={"id": "x"})).ready()
        sent: list[Any] = []
        await fleet.call("/v1/chat/completions", {"messages": []}, sent=sent)
        tags = [backend.tag for backend in fleet.backends.each]
        assert [request.headers["x-request-id"][:8] for request in fleet.requests] == tags
        echoed = dict(sent[0]["headers"])[b"x-request-id"].decode()
        assert echoed == fleet.requests[-1].headers["x-request-id"] and len(echoed) == 32
        fleet = await Fleet("abcd").ready()
        for backend in fleet.backends.each:
            for verb in (f"requests/{backend.tag}ffff/cancel", f"chat/completions/chatcmpl-{backend.tag}ffff"):
                fleet.asked.clear()
                await fleet.call(f"/v1/{verb}", {})
                assert fleet.asked == [backend.url[7]]
            fleet.asked.clear()
            await fleet.call("/abort_request", {"request_id": f"{backend.tag}ffff"})
            assert fleet.asked == [backend.url[7]]
        fleet.requests.clear()
        named = {"prompt": "x", "request_id": "mine"}
        await fleet.call(body=named)
        await fleet.call(body=named, headers={"x-request-id": "its"})
        assert [request.headers["x-request-id"] for request in fleet.requests] == ["mine", "its"]

    run(test)


@pytest.mark.parametrize("kind", [Keeper, Other])
def test_nobody_makes_the_router_lose_another_s_response(kind: type[Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    """By ids in what a server echoes, by a request of that id, by many of both."""
    monkeypatch.setattr(backend_module, "MAX_IDS", 8)

    async def test() -> None:
        servers = {name: kind() for name in "abcd"}
        fleet = await Fleet("abcd", **servers).ready()
        fleet.backends._router._sessions[hash("s")] = 2
        made = json.loads((await fleet.call("/v1/responses", {"input": "x"}, headers={"x-session-id": "s"}))[1])["id"]
        (home,) = fleet.asked
        assert home == "c", "where nobody would look for it first"
        fleet.down = {home}
        await fleet.call(body={"prompt": "x"}, headers={"x-request-id": made})
        for index in range(4):
            ids = [{"id": made}, *({"id": f"resp_{index}{number}"} for number in range(99))]
            await fleet.call("/v1/completions", {"metadata": ids, "input": "x"})
        fleet.down = set()
        while len(fleet.backends.serving) < 4:
            await asyncio.sleep(0.005)
        fleet.asked.clear()
        assert (await fleet.call("/v1/responses", {"input": "y", "previous_response_id": made}))[0] == 200
        assert fleet.asked == [home]

    run(test)


def test_a_conversation_is_asked_for_where_it_was_made() -> None:
    async def test() -> None:
        def keeps(name: str) -> Any:
            return lambda request: httpx.Response(200, json={"id": f"conv_{name}", "object": "conversation"})

        fleet = await Fleet("abc", **{name: keeps(name) for name in "abc"}).ready()
        made = json.loads((await fleet.call("/v1/conversations", {}))[1])["id"]
        fleet.asked.clear()
        for path, body in (
            (f"/v1/conversations/{made}/items", {"items": []}), ("/v1/responses", {"input": "x", "conversation": made}),
            ("/v1/responses", {"input": "x", "conversation": {"id": made}}),
        ):  # fmt: skip
            assert (await fleet.call(path, body))[0] == 200
        assert fleet.asked == [made.removeprefix("conv_")] * 3
        assert asked.read(b'{"conversation": {"id": 7}}').ids == asked.read(b'{"conversation": [1]}').ids == ()
        assert asked.Asked().is_stored("/v1/conversations/conv_a/items"), "it is not sent twice"

    run(test)


def test_ids_of_servers_that_tag_none_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "MAX_IDS", 3)

    async def test() -> None:
        made = iter([
            b'{"id":"resp_1","object":"response"}',
            b'event: response.created\ndata: {"response":{"id":"resp_2","tools":[{"id":"resp_no"}]},"type":"x"}\n\n',
            b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"resp_3"',
            b'data: {"id": "chatcmpl-4", "object": "chat.completion.chunk"}\n\n',
            b'{"tools":[{"id":"resp_no"}],"id":"resp_no"}',
            b'{"id":"resp_' + b"x" * 60_000 + b'"}',
            b'{"id":"cmpl-5"}',
            b'{"id":"conv_6","object":"conversation"}',
        ])  # fmt: skip
        answer = lambda request: httpx.Response(200, content=next(made))  # noqa: E731
        fleet = await Fleet(a=answer, b=answer).ready()
        for _ in range(8):
            await fleet.call()
        assert list(fleet.backends._owners) == ["resp_3", "chatcmpl-4", "conv_6"]

    run(test)


def test_a_request_goes_where_it_fits() -> None:
    async def test() -> None:
        fleet = Fleet("abc", a=TOO_LONG)
        fleet.lengths = {"a": 1000, "b": 8000, "c": 64_000}
        await fleet.ready()
        assert (await fleet.call(body={"prompt": "x" * 20_000}))[0] == 200 and fleet.asked == ["b"], "by its size"
        fleet.asked.clear()
        assert (await fleet.call(body={"prompt": "x" * 900_000}))[0] == 200 and fleet.asked == ["c"], (
            "none: the longest"
        )
        fleet.asked.clear()
        fleet.backends._router._sessions[hash("s")] = 0
        assert (await fleet.call(headers={"x-session-id": "s"}))[0] == 200
        assert fleet.asked == ["a", "c"], "which takes all that any takes"
        for refusal in (
            says(413, "body_too_large"),
            says(400, None, "This model's maximum context length is 9 tokens."),
        ):
            fleet.servers = {"a": refusal}
            fleet.asked.clear()
            fleet.backends._router._sessions[hash("s")] = 0
            assert (await fleet.call(headers={"x-session-id": "s"}))[0] == 200 and fleet.asked == ["a", "c"]
        fleet.servers = dict.fromkeys("abc", TOO_LONG)
        fleet.asked.clear()
        fleet.backends._router._sessions[hash("s")] = 0
        status, body = await fleet.call(headers={"x-session-id": "s"})
        assert status == 400 and b"context_length_exceeded" in body and fleet.asked == ["a", "c"], "once"

    run(test)


@pytest.mark.parametrize("lengths", [{}, {"a": 1000, "b": 1000, "c": 1000}])
def test_what_is_too_long_for_all_is_asked_once_where_that_is_known(lengths: dict[str, int]) -> None:
    async def test() -> None:
        fleet = Fleet("abc", a=TOO_LONG, b=TOO_LONG, c=TOO_LONG)
        fleet.lengths = lengths
        await fleet.ready()
        assert (await fleet.call())[0] == 400 and len(fleet.asked) == (1 if lengths else 2)

    run(test)


def test_the_list_of_models_has_the_longest_of_each() -> None:
    async def test() -> None:
        fleet = Fleet("abc")
        fleet.models = {"a": ["m"], "b": ["m", "n"], "c": ["m"]}
        fleet.lengths = {"a": 1000, "b": 8000, "c": 4000}
        await fleet.ready()
        cards = json.loads((await fleet.call("/v1/models", method="GET"))[1])["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("m", 8000), ("n", 8000)]
        await fleet.call("/v1/models/m", method="GET")
        assert fleet.asked == ["b"]

    run(test)
