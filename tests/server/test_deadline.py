"""--request-timeout is one deadline around a request: its body, its tokens, its grammar, its turn and its answer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from vserve.engine.link.sampling_params import SamplingParams
from vserve.server.app import create_app
from vserve.server.generation.admission import Admission
from vserve.server.generation.choice import Prompt
from vserve.server.generation.generation import Generation
from vserve.server.options.config import ServerConfig
from vserve.server.text.tokenizer import Tokenizer

LONG = "long " * 1000


@pytest.fixture
def late(engine: Any, text_model: Any) -> Any:
    return create_app(engine, ServerConfig(request_timeout=0.2), text_model)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """A tokenizer that does not come to an end before the test does."""
    end = threading.Event()

    def encode(self: Tokenizer, text: str, special: bool) -> list[int]:
        end.wait(60)
        return [5]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    yield
    end.set()


def post(app: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return await asyncio.wait_for(http.post(path, json=body), 20)

    return asyncio.run(main())


def check(answer: httpx.Response, app: Any) -> None:
    assert answer.status_code == 408, answer.text
    assert "--request-timeout, 0.2 s" in answer.text and answer.headers["x-should-retry"] == "false"
    server = app.state.server
    assert server.metrics.timed_out_requests["request"] == 1
    assert server.admission.num_requests == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}),
        ("/v1/embeddings", {"input": LONG}),
        ("/tokenize", {"prompt": LONG}),
    ],
)
def test_it_ends_while_its_text_is_tokenised(
    late: Any, engine: Any, stuck: None, path: str, body: dict[str, Any]
) -> None:
    check(post(late, path, body), late)
    assert not engine.submitted


def test_it_ends_while_its_body_is_read(late: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vserve.server.http import large_body

    end = threading.Event()
    monkeypatch.setattr(large_body, "decode", lambda raw: end.wait(60))
    check(post(late, "/v1/completions", {"prompt": "a" * (large_body.LARGE + 1)}), late)
    end.set()


def test_it_ends_while_its_grammar_is_compiled(new_thinking: Any) -> None:
    thinking = new_thinking(request_timeout=0.2)

    async def acquire(constraint: Any, param: str, owner: str) -> str:
        await asyncio.sleep(60)
        return "key"

    thinking.grammars.acquire = acquire
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}
    check(post(thinking.app, "/v1/chat/completions", body), thinking.app)


@pytest.mark.parametrize("num_bytes", [0, 5])
def test_it_ends_while_its_body_arrives(late: Any, num_bytes: int) -> None:
    """Over a socket: the client is slower than --request-timeout, and faster than --body-timeout."""
    from .conftest import serving

    body = json.dumps({"prompt": "Hi"}).encode()

    async def main() -> bytes:
        async with serving(late) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body[:num_bytes])
            answer = await asyncio.wait_for(reader.read(4096), 20)
            writer.close()
            return answer

    assert asyncio.run(main()).startswith(b"HTTP/1.1 408")


def test_the_clock_of_an_answer_counts_what_came_before_it(engine: Any, app: Any) -> None:
    """But the clock of the queue does not: a body that takes long to arrive does not wait for anybody."""
    timed_out: list[str] = []
    queue = Admission(engine, ServerConfig(request_timeout=100, queue_timeout=50), timed_out.append, timed_out.append)
    engine.delay = 1000.0

    async def main() -> None:
        state = app.state.server
        prompt = Prompt([5], SamplingParams(max_tokens=5))
        generation = Generation(engine, state.metrics, state.model.tokenizer, [prompt], arrival=0.0)
        now = time.monotonic()
        ticket = queue.admit(1, 1, now, now - 99)
        ticket.watch(generation)
        due = sorted(timer.when() - asyncio.get_running_loop().time() for timer in ticket._timers)
        assert 0 < due[0] <= 1 and 49 < due[1] <= 50
        ticket.release()
        generation.close()

    asyncio.run(main())
    assert not timed_out


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_in_time_is_answered(engine: Any, text_model: Any, stream: bool) -> None:
    app = create_app(engine, ServerConfig(request_timeout=50), text_model)
    answer = post(app, "/v1/completions", {"prompt": LONG[:100], "stream": stream})
    assert answer.status_code == 200 and "Hello" in answer.text
    assert not any(app.state.server.metrics.timed_out_requests.values())
