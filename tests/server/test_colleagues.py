"""What the API processes of a server say to each other, with answers that the test gives."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from vserve.server import service
from vserve.server.app import create_app
from vserve.server.client.board import Board
from vserve.server.client.meeting import FIRST, Meeting
from vserve.server.colleagues import ColleagueError, Colleagues, Elsewhere
from vserve.server.desk import Desk
from vserve.server.http.body_limit import BodyLimit
from vserve.server.http.middleware import HttpMetrics, RequestMiddleware
from vserve.server.observe.shares import Family, Sample, summed
from vserve.server.options.config import ServerConfig

Answer = Callable[[int, httpx.Request], httpx.Response]


@pytest.fixture
def colleagues(tmp_path: Path) -> Iterator[Callable[[Answer], Colleagues]]:
    """Of one of three processes; what another one answers, the argument says."""
    board = Board(None, 3, FIRST)

    def make(answer: Answer, seat: int = FIRST) -> Colleagues:
        made = Colleagues(Meeting(str(tmp_path), seat, seat, board, "secret"))
        for seat in made.others:
            transport = httpx.MockTransport(lambda request, seat=seat: answer(seat, request))  # type: ignore[misc]
            made._clients[seat] = httpx.AsyncClient(transport=transport, base_url="http://api")
        return made

    yield make
    os.close(board.descriptor)


def test_of_who_is_gone_or_silent_counters_stay_and_gauges_do_not(colleagues: Any) -> None:
    number, silent = 1, False

    def answer(seat: int, request: httpx.Request) -> httpx.Response:
        if silent and seat == 2:
            raise httpx.ConnectError("nobody is there")
        page = [
            Family("tokens", "Help.", "counter", [Sample("tokens_total", {}, 10.0)]),
            Family("speed", "Help.", "gauge", [Sample("speed", {}, 7.0)]),
        ]
        return httpx.Response(200, content=msgspec.msgpack.encode((number if seat == 1 else 9, page)))

    async def values(asked: Colleagues) -> dict[str, float]:
        return {family.name: family.samples[0].value for family in summed(await asked.shares())}

    async def test() -> None:
        nonlocal number, silent
        asked = colleagues(answer)
        assert await values(asked) == {"tokens": 20, "speed": 14}
        number = 2  # another process on the first seat
        assert await values(asked) == {"tokens": 30, "speed": 14}
        silent = True
        assert await values(asked) == {"tokens": 30, "speed": 7}

    asyncio.run(test())


def test_adapters_are_those_of_all_processes(colleagues: Any) -> None:
    """Their names are labels, and the value is a time: no sum."""

    def page(running: str, waiting: str) -> list[Family]:
        labels = {"max_lora": "4", "waiting_lora_adapters": waiting, "running_lora_adapters": running}
        return [Family("x:lora_requests_info", "Help.", "gauge", [Sample("x:lora_requests_info", labels, 1e9)])]

    (family,) = summed([page("b", ""), page("", ""), page("a,b", "c"), page("", "")])
    (sample,) = family.samples
    assert sample.labels == {"max_lora": "4", "waiting_lora_adapters": "c", "running_lora_adapters": "a,b"}
    assert abs(sample.value - time.time()) < 60


def refuses(seat: int, request: httpx.Request) -> httpx.Response:
    if seat == 2:
        raise httpx.ConnectError("nobody listens")
    return httpx.Response(200)


def hangs(seat: int, request: httpx.Request) -> httpx.Response:
    if seat == 2:
        raise httpx.ReadTimeout("")
    return httpx.Response(200)


def fails(seat: int, request: httpx.Request) -> httpx.Response:
    return httpx.Response(500, text="no such file") if seat == 2 else httpx.Response(200)


def test_who_only_starts_will_read_what_is_new(colleagues: Any) -> None:
    asyncio.run(colleagues(refuses).tell("/own/reload"))


def test_who_only_starts_is_told_how_many_engines_there_are_once_it_listens(colleagues: Any) -> None:
    refusals = [1, 1]

    def answer(seat: int, request: httpx.Request) -> httpx.Response:
        if seat == 2 and refusals:
            refusals.pop()
            raise httpx.ConnectError("nobody listens")
        told.append(seat)
        return httpx.Response(200)

    told: list[int] = []
    asyncio.run(colleagues(answer).tell("/own/engines", {}, wait=True))
    assert told == [1, 2]
    with pytest.raises(ColleagueError, match="API process 2 is not there"):
        asyncio.run(colleagues(refuses).tell("/own/engines", {}, timeout=0.01, wait=True))


@pytest.mark.parametrize(
    ("answer", "said"),
    [(hangs, r"^API process 2 did not answer within 5 s\."), (fails, r"^API process 2: no such file\.")],
)
def test_who_does_not_do_it_is_named(colleagues: Any, new_client: Any, caplog: Any, answer: Any, said: str) -> None:
    with pytest.raises(ColleagueError, match=said):
        asyncio.run(colleagues(answer).tell("/own/reload"))
    client = new_client(admin_api_key=("admin",))
    client.app.state.server.colleagues = colleagues(answer)
    told = client.post("/reload", {}, headers={"authorization": "Bearer admin"})
    assert told.status_code == 500 and re.search(said, told.json()["error"]["message"])
    assert told.json()["error"]["code"] == "reload_failed"

    async def signal() -> None:
        server = SimpleNamespace(reload=lambda: None, colleagues=colleagues(answer))
        told: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(server=server)))
        service.Service._reload(told)
        await told._telling

    asyncio.run(signal())
    assert re.search(said.replace("^", "SIGUSR2: "), caplog.text)


@pytest.mark.parametrize("there", [True, False])
def test_who_answers_counts(colleagues: Any, there: bool) -> None:
    """A request that could not be passed on is counted by the process that says so."""

    def answer(seat: int, request: httpx.Request) -> httpx.Response:
        if not there:
            raise httpx.ConnectError("nobody listens")
        return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

    async def test() -> None:
        scope = {
            "type": "http", "method": "GET", "path": "/v1/responses/a", "headers": [], "state": {"request_id": "r"},
        }  # fmt: skip
        asked = iter([{"type": "http.request", "body": b""}])
        sent: list[Any] = []

        async def receive() -> Any:
            return next(asked, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        elsewhere = Elsewhere(None, colleagues(answer, seat=1))  # type: ignore[arg-type]
        if there:
            await elsewhere(scope, receive, send)
            assert sent[0]["status"] == 200
        else:
            with pytest.raises(httpx.ConnectError):
                await elsewhere(scope, receive, send)
        assert scope["state"].get("passed_on", False) == there  # type: ignore[attr-defined]

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_chat_is_found_whichever_process_answered_it(
    tmp_path: Path, engine: Any, text_model: Any, stream: bool
) -> None:
    """Under each of its names; each process answers its own, and the first one alone stores them."""
    board = Board(None, 2, FIRST)
    boards = board, Board(os.dup(board.descriptor), 2, 1)

    async def test() -> None:
        clients, servers, desks = [], [], []
        for seat in (0, 1):
            meeting = Meeting(str(tmp_path), seat, seat, boards[seat], "secret")
            app = create_app(engine, ServerConfig(api_key=("one", "two")), text_model, meeting=meeting)
            desk = Desk(meeting, app)  # type: ignore[arg-type]
            desk.open(app.state.server)
            desks.append(asyncio.create_task(desk.serve()))
            servers.append(app.state.server)
            clients.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x"))
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"messages": [{"role": "user", "content": "Hi"}], "store": True, "metadata": {"a": "b"}}
        made = []
        for client in clients:
            for path in ("/v1/chat/completions", "/invocations"):
                answer = await client.post(path, json=body | {"stream": stream}, headers=one)
                assert answer.status_code == 200, answer.text
                made.append(re.search(r'"id":"(chatcmpl-[^"]+)"', answer.text)[1])  # type: ignore[index]
        while tasks := [task for server in servers for task in server.tasks]:  # a stream's comes after its end
            await asyncio.gather(*tasks)
        for client in clients:
            listed = (await client.get("/v1/chat/completions", headers=one)).json()["data"]
            assert [chat["id"] for chat in listed] == made and listed[3]["metadata"] == {"a": "b"}
            assert (await client.get("/v1/chat/completions", headers=two)).json()["data"] == []
            for id in made:
                messages = (await client.get(f"/v1/chat/completions/{id}/messages", headers=one)).json()["data"]
                assert messages[0]["content"] == "Hi"
                assert (await client.get(f"/v1/chat/completions/{id}", headers=two)).status_code == 404
                assert (await client.delete(f"/v1/chat/completions/{id}", headers=two)).status_code == 404
        assert len(servers[0].chats) == 4 and len(servers[1].chats) == 0
        for client, server in zip(clients, servers, strict=True):
            await client.aclose()
            await server.colleagues.close()
        for task in desks:
            task.cancel()

    asyncio.run(asyncio.wait_for(test(), 60))
    for one in boards:
        os.close(one.descriptor)


def test_the_body_of_a_chat_is_not_looked_at_on_its_way(colleagues: Any) -> None:
    """It may be megabytes: whoever answers it reads it, in one place and within its limits."""

    async def test() -> None:
        received: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            received.append(receive)

        async def receive() -> Any:
            raise AssertionError("it is read")

        elsewhere = Elsewhere(app, colleagues(refuses, seat=1))
        for path in ("/v1/chat/completions", "/invocations", "/v1/completions", "/v1/messages"):
            await elsewhere({"type": "http", "method": "POST", "path": path, "headers": []}, receive, None)  # type: ignore[arg-type]
        assert received == [receive] * 4

    asyncio.run(test())


def test_a_body_that_is_too_large_to_be_passed_on_is_a_413(colleagues: Any) -> None:
    """As for the process that answers itself, though no route is there to tell it."""

    async def test() -> None:
        elsewhere = Elsewhere(None, colleagues(refuses, seat=1))  # type: ignore[arg-type]
        door = RequestMiddleware(BodyLimit(elsewhere, lambda: 10, lambda reason: None), HttpMetrics())
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"x" * 8, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        await door({"type": "http", "method": "POST", "path": "/v1/responses", "headers": []}, receive, send)
        assert sent[0]["status"] == 413 and b"body_too_large" in sent[1]["body"]

    asyncio.run(test())
