"""Many inputs of one request: the engine has enough to do, and whoever comes later does not wait for all of them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from vserve.engine.link.messages import RequestOutput
from vserve.server.app import create_app
from vserve.server.options.config import ServerConfig

NUM_INPUTS = 400


@pytest.fixture
def embeds(engine: Any) -> dict[str, int]:
    """The most inputs that are open at once, and the most tokens of them. Its engine says the first token of each, once
    it is sent no more."""
    most, submit, lengths = {"inputs": 0, "tokens": 0}, engine.submit, {}

    def watched(token_ids: list[int], *arguments: Any, **options: Any) -> Any:
        mailbox = submit(token_ids, *arguments, **options)
        lengths[mailbox.id] = len(token_ids)
        most["inputs"] = max(most["inputs"], engine.num_open)
        most["tokens"] = max(most["tokens"], sum(lengths[id] for id in engine._open))
        return mailbox

    async def embed(request: Any, mailbox: Any) -> None:
        num_sent = 0
        while num_sent != len(engine.submitted):
            num_sent = len(engine.submitted)
            await asyncio.sleep(0.002)
        if request.id in engine._open:
            engine._put(
                mailbox, RequestOutput(request.id, [], "stop", embedding=struct.pack("<f", request.token_ids[0]))
            )

    engine.submit, engine._run = watched, embed
    return most


def ask(
    engine: Any, model: Any, inputs: list[list[int]], meanwhile: Callable[[Any], None],
    headers: dict[str, str] | None = None, **options: Any,
) -> Any:  # fmt: skip
    app = create_app(engine, ServerConfig(**options), model)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as http:
            body = {"input": inputs, "normalize": False}
            asking = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=headers))
            while len(engine.submitted) < NUM_INPUTS // 8 and not asking.done():
                await asyncio.sleep(0)
            meanwhile(app.state.server)
            return await asking

    answer = asyncio.run(main())
    assert engine.num_open == 0 and app.state.server.admission.num_requests == 0
    return answer


# A step has 512 tokens, and 64 requests run at once: four times that.
@pytest.mark.parametrize(("length", "most"), [(1, 256), (100, 21)])
def test_a_few_steps_are_with_the_engine(
    embeds: dict[str, int], engine: Any, text_model: Any, length: int, most: int
) -> None:
    inputs = [[3 + i % 300] * length for i in range(NUM_INPUTS)]
    answer = ask(engine, text_model, inputs, lambda server: None)
    assert answer.status_code == 200, answer.text
    assert [one["embedding"] for one in answer.json()["data"]] == [[ids[0]] for ids in inputs]
    assert [one["index"] for one in answer.json()["data"]] == list(range(NUM_INPUTS))
    assert answer.json()["usage"]["prompt_tokens"] == NUM_INPUTS * length
    assert embeds["inputs"] == most and embeds["tokens"] < 4 * 512 + length


@pytest.mark.parametrize(
    ("headers", "most"), [({}, 41), ({"x-session-id": "s"}, 21), ({"x-data-parallel-rank": "1"}, 21)]
)
def test_each_engine_has_as_many(
    embeds: dict[str, int], engine: Any, text_model: Any, headers: dict[str, str], most: int,
) -> None:  # fmt: skip
    """Of two; what is for one of them is not with that one for twice as long."""
    engine.engines = [engine, engine]
    inputs = [[3 + i % 300] * 100 for i in range(NUM_INPUTS)]
    assert ask(engine, text_model, inputs, lambda server: None, headers).status_code == 200
    assert embeds["inputs"] == most


def test_what_is_cancelled_sends_no_more(embeds: dict[str, int], engine: Any, text_model: Any) -> None:
    inputs = [[3 + i % 300] * 100 for i in range(NUM_INPUTS)]
    answer = ask(engine, text_model, inputs, lambda server: next(iter(server.generations)).cancel())
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "cancelled"
    assert len(engine.submitted) < NUM_INPUTS // 2


def test_time_ends_what_is_not_sent_yet(embeds: dict[str, int], engine: Any, text_model: Any) -> None:
    inputs = [[3 + i % 300] * 128 for i in range(NUM_INPUTS)]
    answer = ask(engine, text_model, inputs, lambda server: None, request_timeout=0.03)
    assert answer.status_code == 408 and len(engine.submitted) < NUM_INPUTS


def test_what_fails_ends_the_others(embeds: dict[str, int], engine: Any, text_model: Any) -> None:
    inputs = [[3 + i % 300] * 100 for i in range(NUM_INPUTS)]

    def fail(server: Any) -> None:
        generation = next(iter(server.generations))
        mailbox = generation.awaited[0]
        engine._put(mailbox, RequestOutput(mailbox.id, [], "error", error="NaN"))

    answer = ask(engine, text_model, inputs, fail)
    assert answer.status_code == 500 and "NaN" in answer.json()["error"]["message"]
    assert len(engine.submitted) < NUM_INPUTS // 2
