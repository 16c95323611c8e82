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
from vserve.server.client.board import Board
from vserve.server.client.meeting import FIRST, Meeting
from vserve.server.colleagues import ColleagueError, Colleagues, Elsewhere
from vserve.server.observe.shares import Family, Sample, summed

Answer = Callable[[int, httpx.Request], httpx.Response]


@pytest.fixture
def colleagues(tmp_path: Path) -> Iterator[Callable[[Answer], Colleagues]]:
    """Of one of three processes; what another one answers, the argument says."""
    board = Board(None, 3, FIRST)

    def make(answer: Answer, seat: int = FIRST) -> Colleagues:
        made = Colleagues(Meeting(str(tmp_path), seat, seat, board))
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
