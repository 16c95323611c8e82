"""What a body costs the router: not its values, and room only until it is sent on."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator

import httpx
import pytest

from vserve.server.http.body_limit import BodyLimit
from vserve.server.http.middleware import HttpMetrics, RequestMiddleware
from vserve.server.router import app as app_module
from vserve.server.router import asked as asked_module
from vserve.server.router.asked import read
from vserve.server.router.body import Body

from .fleet import STREAM, Fleet, Pieces, run

HEAD = b'{"model":"m","messages":[{"role":"user","content":"x"}],"junk":'


def test_a_body_of_too_many_values_is_refused_before_any_is_made() -> None:
    async def test() -> None:
        fleet = await Fleet().ready()
        body = HEAD + b"[" + b"[]," * 4_000_000 + b"[]]}"
        tracemalloc.start()
        try:
            status, said = await fleet.call("/v1/chat/completions", raw=body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert status == 400 and json.loads(said)["error"]["code"] == "too_many_values" and not fleet.asked
        assert peak < 3 * len(body)

    run(test)


@pytest.mark.parametrize("junk", [b"[" + b"{}," * 60_000 + b'"%b"]' % (b"x" * 300_000), b'"%b"' % (b"x" * 2_000_000)])
def test_no_value_is_made_of_what_routing_does_not_need(junk: bytes) -> None:
    body = HEAD + junk + b"}"
    tracemalloc.start()
    try:
        asked = read(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert asked.model == "m" and asked.num_tokens == 7 and peak < 1 << 20


def test_of_a_long_text_the_beginning_is_compared() -> None:
    one, other = (read(json.dumps({"prompt": "x" * (8 << 20) + end}).encode()) for end in "ab")
    assert len(one.keys) == 4096 and one.keys == other.keys and one.num_tokens == 2 << 20


def test_the_event_loop_reads_small_bodies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loop: list[int] = []

    def looks(body: bytes, who: str = "") -> asked_module.Asked:
        if threading.current_thread() is threading.main_thread():
            on_the_loop.append(len(body))
        return read(body, who)

    monkeypatch.setattr(asked_module, "read", looks)

    async def test() -> None:
        fleet = await Fleet().ready()
        sizes = 1000, 200_000, 300_000, 9_000_000
        for size in sizes:
            assert (await fleet.call(body={"prompt": "x" * size}))[0] == 200
        assert len(on_the_loop) == 2 and max(on_the_loop) < 256 << 10
        await fleet.call(raw=b"\x00{" * 300_000, headers={"content-type": "audio/wav"})
        assert len(fleet.asked) == len(sizes) + 1, "what is no JSON is for the servers alone"

    run(test)


def test_a_body_takes_room_until_its_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Body] = []

    class Seen(Body):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            bodies.append(self)

    monkeypatch.setattr(app_module, "Body", Seen)

    async def test() -> None:
        begin, end, held = asyncio.Event(), asyncio.Event(), []

        async def pieces() -> AsyncIterator[bytes]:
            held.append(limit.num_bytes)
            await begin.wait()
            yield b"data: 1\n\n"
            await end.wait()

        def stream(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers=STREAM, stream=Pieces(pieces()))

        fleet = await Fleet(a=stream, b=stream).ready()
        limit = BodyLimit(fleet.app, lambda: 1 << 20, lambda reason: None)
        fleet.door = RequestMiddleware(limit, HttpMetrics())
        sent: list = []
        calling = asyncio.create_task(fleet.call(body={"prompt": "x" * 500_000}, sent=sent))
        while not held:
            await asyncio.sleep(0.001)
        assert held[0] > 500_000 and len(bodies[0].content) > 500_000, "it may have to go elsewhere"
        begin.set()
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        assert not calling.done() and limit.num_bytes == 0 and not bodies[0].content
        end.set()
        assert (await calling)[0] == 200

    run(test)
