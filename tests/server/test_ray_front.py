"""What HTTP reaches of the Ray Serve application, before replicas that do what the test says: without a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

ray_serve = pytest.importorskip("vserve.server.ray_serve", exc_type=ImportError)


class Replicas:
    """The handle of the model's deployment."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths  # of those that are asked first
        self.asked: list[Any] = []
        self.answer = self

    def options(self, stream: bool) -> Replicas:
        return self

    async def remote(self, ask: Any, *request: Any) -> AsyncIterator[Any]:
        self.asked.append(ask.asked)
        if len(self.asked) <= self.deaths:
            raise ray_serve.RayActorError
        yield 200
        yield [(b"content-type", b"text/plain")]
        yield b"fine"


def call(front: Any, path: str, body: bytes) -> tuple[int, bytes]:
    from starlette.requests import Request

    async def main() -> tuple[int, bytes]:
        pieces = [body[start : start + 65536] for start in range(0, len(body), 65536)]
        sent: list[Any] = []

        async def receive() -> Any:
            if not pieces:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await (await front(Request(scope, receive)))(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    return asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    ("path", "body", "deaths", "times", "status"),
    [
        ("/v1/completions", {"prompt": "x"}, 1, 2, 200),
        ("/v1/completions", {"prompt": "x"}, 9, 2, 502),
        ("/v1/responses", {"input": "x"}, 1, 1, 502),
        ("/v1/responses", {"input": "x", "store": False}, 1, 2, 200),
    ],
)
def test_a_request_takes_down_two_replicas_at_most(path: str, body: Any, deaths: int, times: int, status: int) -> None:
    replicas = Replicas(deaths)
    found, said = call(ray_serve.Front(replicas), path, json.dumps(body).encode())
    assert (found, len(replicas.asked)) == (status, times)
    assert status == 200 or json.loads(said)["error"]["code"] == "server_lost"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"prompt":"' + b"x" * 500_000 + b'"}', 200, ""),
        (b'{"prompt":"x","junk":[' + b"[]," * 600_000 + b"[]]}", 400, "too_many_values"),
        (b'{"prompt":"' + b"x" * 2_000_000 + b'"}', 413, "body_too_large"),
    ],
)
def test_bodies_are_bounded_in_size_and_in_values(body: bytes, status: int, code: str) -> None:
    replicas = Replicas(0)
    found, said = call(ray_serve.Front(replicas, 2_000_000), "/v1/completions", body)
    assert found == status and len(replicas.asked) == (status == 200)
    assert status == 200 or json.loads(said)["error"]["code"] == code
