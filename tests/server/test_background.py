"""Responses that run without their client: polled, followed from any event on, cancelled, bounded."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx

from vserve.engine.options.config import EngineConfig
from vserve.server.api import background
from vserve.server.cli.progress import ProgressLine
from vserve.server.dialects.responses.log import EventLog
from vserve.server.dialects.store import Store
from vserve.server.options.config import ServerConfig
from vserve.server.service import Service


async def ended(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    for _ in range(500):
        response = (await http.get(url)).json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)
    raise AssertionError(response)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(part.partition("\ndata: ")[2]) for part in text.split("\n\n")[:-1]]


def test_it_runs_without_its_client(serve: Any, engine: Any, app: Any) -> None:
    engine.delay = 0.25
    state = app.state.server

    async def test(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1/responses"
        async with httpx.AsyncClient() as http:
            first = (await http.post(base, json={"input": "Hi", "background": True})).json()
        assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
        assert state.admission.num_requests == 1, "it holds its place"
        async with httpx.AsyncClient() as http:
            url = f"{base}/{first['id']}"
            running = (await http.get(url)).json()
            assert running["status"] == "in_progress" and running["id"] == first["id"]
            assert (await http.delete(url)).status_code == 400
            response = await ended(http, url)
            assert response["status"] == "completed"
            assert response["output"][0]["content"][0]["text"] == "Hello world!"
            refused = await http.get(url, params={"stream": "true"})
            assert refused.status_code == 400 and "has no events" in refused.json()["error"]["message"]
            goes_on = {"input": "Why?", "previous_response_id": first["id"]}
            assert (await http.post(base, json=goes_on)).status_code == 200
            assert (await http.delete(url)).json()["deleted"]
        await asyncio.sleep(0)
        assert state.admission.num_requests == 0 and not state.tasks

    serve(test)


def test_its_events_can_be_read_again(serve: Any, engine: Any) -> None:
    engine.delay = 0.1

    async def test(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1/responses"
        body = {"input": "Hi", "background": True, "stream": True}
        async with httpx.AsyncClient() as http:
            async with http.stream("POST", base, json=body) as stream:
                async for line in stream.aiter_lines():  # this client leaves after the first event
                    if line.startswith("data: "):
                        id = json.loads(line[6:])["response"]["id"]
                        break
            url = f"{base}/{id}"
            assert (await http.get(url)).json()["status"] == "in_progress"
            whole = events((await http.get(url, params={"stream": "true"})).text)  # until it ends
            assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
            assert whole[0]["type"] == "response.created" and whole[-1]["type"] == "response.completed"
            assert "".join(e["delta"] for e in whole if e["type"].endswith("text.delta")) == "Hello world!"
            assert whole[-1]["response"] == (await http.get(url)).json()
            for after in (0, 3, len(whole) - 1, 999):
                again = await http.get(url, params={"stream": "true", "starting_after": after})
                assert events(again.text) == whole[after + 1 :]
            wrong = await http.get(url, params={"stream": "true", "starting_after": "x"})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "starting_after"
            assert (await http.get(f"{base}/other?stream=true")).status_code == 404

    serve(test)


def test_cancel_and_failure(serve: Any, engine: Any, app: Any) -> None:
    engine.delay, engine.script = 0.01, lambda request: [[50]] * 10_000

    async def test(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1/responses"
        async with httpx.AsyncClient() as http:
            id = (await http.post(base, json={"input": "Hi", "background": True})).json()["id"]
            assert (await http.post(f"{base}/{id}/cancel")).json()["status"] == "cancelled"
            assert (await ended(http, f"{base}/{id}"))["status"] == "cancelled"
            assert engine.num_open == 0
            engine.script, engine.fail_with = lambda request: [[50]], "broken"
            id = (await http.post(base, json={"input": "Hi", "background": True})).json()["id"]
            failed = await ended(http, f"{base}/{id}")
            assert failed["status"] == "failed" and "broken" in failed["error"]["message"]
            bad = await http.post(base, json={"input": "Hi", "background": True, "stop_token_ids": [9999]})
            assert bad.status_code == 400, "what is wrong is said at once"
        await asyncio.sleep(0)
        assert app.state.server.admission.num_requests == 0

    serve(test)


def test_the_events_are_bounded(serve: Any, engine: Any, app: Any) -> None:
    engine.delay, engine.script = 0.001, lambda request: [[50]] * 10_000
    app.state.server.responses.max_bytes = 4000

    async def test(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1/responses"
        body = {"input": "Hi", "background": True, "stream": True}
        async with httpx.AsyncClient() as http:
            whole = events((await http.post(base, json=body)).text)
        assert whole[-1]["response"]["status"] == "cancelled"
        assert app.state.server.responses.num_log_bytes == 0 and engine.num_open == 0

    serve(test)


class Running:
    """A response, as far as its log goes."""

    closed = cancelled = False

    def __init__(self) -> None:
        self.log, self.generation = EventLog(), self

    def close(self) -> None:
        self.closed = True

    def cancel(self) -> None:
        self.cancelled = True


def test_one_keys_events_end_no_response_of_another_key() -> None:
    """The room for events is nearly full of one key's when another's come."""

    async def main() -> None:
        store, over = Store(10, 10_000), asyncio.Event()
        runs = {name: Running() for name in ("small", "large", "other")}
        store.running.update({("one" if name != "other" else "two", name): run for name, run in runs.items()})  # type: ignore[misc]

        async def told(size: int, times: int) -> AsyncIterator[bytes]:
            for _ in range(times):
                yield b"x" * size
            await over.wait()

        server: Any = SimpleNamespace(responses=store)
        tasks = []
        for name, size, times in (("small", 3000, 1), ("large", 4000, 1), ("other", 500, 9)):
            ticket: Any = SimpleNamespace(release=lambda: None)
            run: Any = runs[name]
            tasks.append(asyncio.create_task(background._run(server, run, told(size, times), ticket, lambda: None)))
            await asyncio.sleep(0.01)
        assert [name for name, run in runs.items() if run.cancelled] == ["large"]
        over.set()
        await asyncio.gather(*tasks)
        assert store.num_log_bytes == 0 and store.largest_log() is None

    asyncio.run(main())


def test_without_a_store(new_client: Any, engine: Any) -> None:
    answer = new_client(response_store_size=0).post("/v1/responses", {"input": "Hi", "background": True})
    assert answer.status_code == 400 and "--response-store-size" in answer.json()["error"]["message"]
    assert not engine.submitted


def test_a_drain_waits_for_it(serve: Any, engine: Any, app: Any) -> None:
    engine.delay = 0.05

    async def test(port: int) -> None:
        with socket.socket() as sock:
            service = Service(EngineConfig(model="m"), ServerConfig(shutdown_timeout=60), {}, sock, ProgressLine())
        service.app, service._signal = app, signal.SIGTERM
        async with httpx.AsyncClient() as http:
            base = f"http://127.0.0.1:{port}/v1/responses"
            first = (await http.post(base, json={"input": "Hi", "background": True})).json()
            await asyncio.wait_for(service._drain(), 60)
            assert service.server.should_exit
            assert (await http.get(f"{base}/{first['id']}")).json()["status"] == "completed"

    serve(test)
