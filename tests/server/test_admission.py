"""The queue in front of the engine: how many may wait, what the others are told, and that every place is given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from vserve.engine.link.messages import EngineStats
from vserve.engine.link.sampling_params import SamplingParams
from vserve.server.app import create_app
from vserve.server.errors import ApiError
from vserve.server.generation.admission import LONGEST_WAIT, WINDOW, Admission, DrainRate, retry_after
from vserve.server.generation.choice import Prompt
from vserve.server.generation.generation import Generation
from vserve.server.http.middleware import HttpMetrics, RequestMiddleware
from vserve.server.options.config import ServerConfig


def admission(num_waiting: int = 0, **options: Any) -> Any:
    info = SimpleNamespace(max_num_seqs=4, num_kv_tokens=160)
    client = SimpleNamespace(info=info, stats=EngineStats(num_waiting=num_waiting))
    counted: list[str] = []
    made: Any = Admission(client, ServerConfig(**options), counted.append, counted.append)  # type: ignore[arg-type]
    made.counted = counted
    return made


def test_places_in_the_batch_and_in_the_queue() -> None:
    queue = admission(max_num_queued_reqs=2)
    tickets = [queue.admit(1, 1, 0.0) for _ in range(6)]  # four run, two wait
    with pytest.raises(ApiError) as refused:
        queue.admit(1, 1, 0.0)
    assert refused.value.status == 429 and refused.value.code == "queue_full"
    assert "2 requests wait" in refused.value.message and queue.counted == ["queued_requests"]
    tickets.pop().release()
    queue.admit(1, 1, 0.0)


def test_choices_and_prompts_count_one_by_one() -> None:
    queue = admission(max_num_queued_reqs=2)
    queue.admit(5, 1, 0.0)
    with pytest.raises(ApiError):
        queue.admit(2, 1, 0.0)
    queue.admit(1, 1, 0.0)


def test_a_lone_request_has_no_more_choices_than_run_and_wait_at_once() -> None:
    """Everybody else would be turned away for as long as it runs; at no other time would it fit either."""
    queue = admission(max_num_queued_reqs=2)
    with pytest.raises(ApiError) as refused:
        queue.admit(7, 1, 0.0)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_value", "n")
    assert "asks for 7 answers" in error.message and "at most 6" in error.message
    assert "--max-num-queued-reqs" in error.message and not queue.counted
    ticket = queue.admit(6, 1, 0.0)
    with pytest.raises(ApiError) as refused:  # also while others are there
        queue.admit(7, 1, 0.0)
    assert refused.value.status == 400
    ticket.release()
    unlimited = admission(max_num_queued_reqs=0, max_num_queued_tokens=0)
    unlimited.admit(16_384, 1, 0.0).settle(10**9)


def test_a_lone_request_has_no_more_tokens_than_are_read_and_wait_at_once() -> None:
    """What a body's size says of them is a guess: that alone turns nobody away."""
    queue = admission(max_num_queued_tokens=40)  # the cache holds 160
    ticket = queue.admit(2, 10**6, 0.0)
    with pytest.raises(ApiError) as refused:
        ticket.settle(201)
    assert refused.value.status == 400 and refused.value.param == "prompt"
    assert "have 201 tokens" in refused.value.message and "lets 200" in refused.value.message
    assert "--max-num-queued-tokens" in refused.value.message
    ticket.settle(200)
    ticket.release()
    assert queue.num_requests == queue.num_tokens == 0


def test_what_waits_in_the_engine_for_memory_counts_though_places_are_free() -> None:
    queue = admission(num_waiting=2, max_num_queued_reqs=2)
    queue.admit(1, 1, 0.0)
    queue.admit(1, 1, 0.0)  # the engine's word is old: only one can wait by now
    with pytest.raises(ApiError):
        queue.admit(1, 1, 0.0)


def test_tokens() -> None:
    queue = admission(max_num_queued_tokens=40)  # the cache holds 160
    first = queue.admit(1, 10, 0.0)
    first.settle(150)
    queue.admit(1, 50, 0.0)
    with pytest.raises(ApiError) as refused:
        queue.admit(1, 1, 0.0)
    assert "40 tokens wait" in refused.value.message and "--max-num-queued-tokens" in refused.value.message
    assert queue.counted == ["queued_tokens"]
    first.release()
    first.release()
    assert (queue.num_requests, queue.num_tokens) == (1, 50)


def test_defaults_and_no_limit() -> None:
    queue = admission()
    for _ in range(4 + 4 * 4):
        queue.admit(1, 1, 0.0)
    with pytest.raises(ApiError, match="allows 16"):
        queue.admit(1, 1, 0.0)
    unlimited = admission(max_num_queued_reqs=0, max_num_queued_tokens=0)
    for _ in range(1000):
        unlimited.admit(10, 10**6, 0.0)


def test_one_tenant_cannot_fill_the_queue_for_all() -> None:
    queue = admission()  # 4 run, 16 wait; beside them 4 of others
    first = queue.admit(20, 1, 0.0, tenant=1)
    with pytest.raises(ApiError) as refused:
        queue.admit(1, 1, 0.0, tenant=1)
    assert "this key or address has 20 requests open" in refused.value.message
    tickets = [queue.admit(1, 1, 0.0, tenant=tenant) for tenant in (2, 3, 2, 3)]
    with pytest.raises(ApiError) as refused:
        queue.admit(1, 1, 0.0, tenant=4)
    assert "has 0 requests open" in refused.value.message, "the reserve is full"
    tickets[0].release()
    with pytest.raises(ApiError):
        queue.admit(1, 1, 0.0, tenant=1)
    queue.admit(1, 1, 0.0, tenant=4)
    first.release()
    queue.admit(16, 1, 0.0, tenant=1)
    assert queue.tenants.held(1) == (16, 1)


def test_who_holds_an_equal_share_has_none_of_the_reserve() -> None:
    queue = admission()
    queue.admit(11, 1, 0.0, tenant=1)
    queue.admit(9, 1, 0.0, tenant=2)
    queue.admit(1, 1, 0.0, tenant=2)
    for tenant in (1, 2):
        with pytest.raises(ApiError):
            queue.admit(1, 1, 0.0, tenant=tenant)
    queue.admit(3, 1, 0.0, tenant=3)


def test_long_prompts_of_one_tenant_leave_room_for_others() -> None:
    queue = admission(max_num_queued_tokens=40)  # the cache holds 160
    queue.admit(1, 10, 0.0, tenant=1).settle(200)
    with pytest.raises(ApiError, match="this key or address has 200 tokens open"):
        queue.admit(1, 1, 0.0, tenant=1)
    queue.admit(1, 10, 0.0, tenant=2)
    with pytest.raises(ApiError):
        queue.admit(1, 1, 0.0, tenant=2)


def test_drain_rate_is_measured() -> None:
    rate, now = DrainRate(), 100.0
    rate.begin(now)
    assert rate.per_second(now) == 0
    for _ in range(50):  # two a second, from the first second on
        now += 0.5
        rate.add(1, now)
        if now >= 102:
            assert rate.per_second(now) == pytest.approx(2, rel=0.3)
    assert rate.per_second(now) == pytest.approx(2, rel=0.05)
    for _ in range(400):
        now += 0.1
        rate.add(3, now)
    assert rate.per_second(now) == pytest.approx(30, rel=0.3)
    rate.begin(now + 10_000)  # nothing was asked for in between: the server is as fast as it was
    assert rate.per_second(now + 10_000) == pytest.approx(30, rel=0.3)
    assert rate.per_second(now + 10_000 + 10 * WINDOW) < 1  # but now something is open, and does not end


def test_retry_after_follows_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    queue = admission(max_num_queued_reqs=1)
    for _ in range(100):
        ticket = queue.admit(1, 1, 0.0)
        clock[0] += 0.25
        ticket.release()  # four a second
    for _ in range(5):
        queue.admit(1, 1, 0.0)
    with pytest.raises(ApiError) as refused:
        queue.admit(1, 1, 0.0)
    assert 200 < int(refused.value.headers["retry-after-ms"]) < 320 and refused.value.headers["retry-after"] == "1"
    queue = admission(max_num_queued_reqs=1)
    slow = queue.admit(1, 1, 0.0)
    clock[0] += 1000
    slow.release()
    for _ in range(5):
        queue.admit(1, 1, 0.0)
    with pytest.raises(ApiError) as refused:
        queue.admit(1, 1, 0.0)
    assert WINDOW <= float(refused.value.headers["retry-after"]) <= LONGEST_WAIT
    assert retry_after(0.2) == {"retry-after": "1", "retry-after-ms": "200"}


def test_a_check_costs_the_same_however_long_the_queue(costs_at_most: Any) -> None:
    def cost(num_open: int) -> Callable[[], float]:
        queue = admission(max_num_queued_reqs=0, max_num_queued_tokens=0)
        for _ in range(num_open):
            queue.admit(1, 1, 0.0)

        def seconds() -> float:
            started = time.perf_counter()
            for _ in range(200):
                queue.admit(1, 1, 0.0).release()
            return time.perf_counter() - started

        return seconds

    assert costs_at_most(5, cost(20_000), cost(10))


# ---- through the server ----


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hello"}, {"prompt": "Hello", "stream": True}, {"prompt": ["a", "b"], "n": 3, "temperature": 1},
        {"prompt": "Hello", "max_tokens": 10**6}, {"prompt": "Hello", "n": 0}, {"prompt": [[0, 10**9]]},
        {"prompt": "Hello", "model": "nobody"},
    ],
)  # fmt: skip
def test_places_are_given_back_however_it_ends(app: Any, client: Any, engine: Any, body: dict[str, Any]) -> None:
    queue = app.state.server.admission
    for fault in (None, "fail_with", "die"):
        if fault == "fail_with":
            engine.script, engine.fail_with = (lambda request: [[50]]), "a broken step"
        elif fault == "die":
            engine.die_after, engine.num_outputs = 1, 0
        client.post("/v1/completions", body)
        assert queue.num_requests == queue.num_tokens == 0


@pytest.mark.parametrize(
    "few, many",
    [
        ({"n": 16}, {"n": 17}), ({"prompt": ["a"] * 16}, {"prompt": ["a"] * 17}),
        ({"prompt": ["a", "b"], "n": 8}, {"prompt": ["a", "b"], "n": 9}),
    ],
)  # fmt: skip
def test_more_choices_than_fit_at_any_time(new_client: Any, engine: Any, few: Any, many: Any) -> None:
    engine.info = msgspec.structs.replace(engine.info, max_num_seqs=4)
    client = new_client(max_num_queued_reqs=12)
    assert client.complete(temperature=1, **few).status_code == 200
    refused = client.complete(temperature=1, **many)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == ("n" if "n" in many else "prompt")
    assert "at most 16" in refused.json()["error"]["message"] and len(engine.submitted) == 16


def test_a_long_list_of_embeddings_is_let_in_alone(
    app: Any, client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 inputs are OpenAI's limit, and soon done."""
    queue = app.state.server.admission
    monkeypatch.setattr(queue, "_max_requests", 1)
    monkeypatch.setattr(queue, "_max_tokens", 1)
    monkeypatch.setattr("vserve.server.api.embeddings.vector_of", lambda choice: bytes(4))
    engine.info = msgspec.structs.replace(engine.info, max_num_seqs=4, num_kv_tokens=16)
    answer = client.post("/v1/embeddings", {"input": ["a"] * 64})
    assert answer.status_code == 200 and len(answer.json()["data"]) == 64, answer.text
    assert queue.num_requests == queue.num_tokens == 0


def test_the_queue_is_full_before_anything_is_tokenised(
    engine: Any, text_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vserve.server.text.tokenizer import Tokenizer

    app = create_app(engine, ServerConfig(max_num_queued_reqs=1), text_model)
    engine.info = msgspec.structs.replace(engine.info, max_num_seqs=1)
    engine.delay = 1000.0

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            body = {"prompt": "Hello", "max_tokens": 5}
            tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
            while engine.num_open < 2:
                await asyncio.sleep(0.001)
            monkeypatch.setattr(Tokenizer, "encode", lambda *arguments: pytest.fail("tokenised"))
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "rate_limit_error" and answer.headers["retry-after"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert app.state.server.admission.num_requests == 0
            page = (await http.get("/metrics")).text
            assert 'reason="queued_requests"} 1.0' in page

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_request_timeout(engine: Any, text_model: Any, stream: bool, begun: bool) -> None:
    # Whoever is to begin needs the time, on a busy machine too.
    app = create_app(engine, ServerConfig(request_timeout=2.0 if begun else 1.0), text_model)
    engine.script = lambda request: [[50]] * 1000
    engine.delay = 0.02 if begun else 1000.0

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            body = {"prompt": "Hello", "max_tokens": 1000, "stream": stream}
            answer = await http.post("/v1/completions", json=body)
        if stream and begun:
            *_, error, done = answer.text.strip().split("\n\n")
            assert answer.status_code == 200 and done == "data: [DONE]"
            assert '"code":"request_timeout"' in error and "--request-timeout" in error
        else:
            assert answer.status_code == 408 and answer.json()["error"]["code"] == "request_timeout"
            assert answer.headers["x-should-retry"] == "false"
        assert engine.aborted == [0] and not engine.num_open
        assert app.state.server.metrics.timed_out_requests["request"] == 1
        assert app.state.server.metrics.aborted_requests["timeout"] == 1

    engine.info = msgspec.structs.replace(engine.info, max_model_len=10**6)
    asyncio.run(main())


def test_the_request_timeout_does_not_wait_for_a_slow_reader(app: Any, engine: Any) -> None:
    """What it has not read yet it still gets; nothing more is computed for it."""
    engine.paced, engine.script = False, lambda request: [[50]] * 100_000
    timed_out: list[str] = []
    queue = Admission(engine, ServerConfig(request_timeout=0.01), timed_out.append, timed_out.append)

    async def main() -> None:
        state = app.state.server
        prompt = Prompt([5], SamplingParams(max_tokens=100_000))
        generation = Generation(engine, state.metrics, state.model.tokenizer, [prompt], arrival=0.0)
        await generation.submit()
        while not engine.num_outputs:
            await asyncio.sleep(0)
        queue.admit(1, 1, time.monotonic()).watch(generation)
        deltas = generation.deltas()
        while not timed_out:
            await asyncio.sleep(0)
        assert engine.aborted == [0] and engine.num_outputs < 100_000
        assert (await anext(deltas))[1].text.startswith("P")
        with pytest.raises(ApiError) as late:
            await anext(deltas)
        assert late.value.status == 408
        generation.close()
        assert state.metrics.aborted_requests["timeout"] == 1

    asyncio.run(main())


def test_clocks_stop_with_the_request(engine: Any, text_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(engine, ServerConfig(request_timeout=300, queue_timeout=300), text_model)

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            assert (await http.post("/v1/completions", json={"prompt": "Hello"})).status_code == 200
        loop = asyncio.get_running_loop()
        later = loop.time() + 1000
        monkeypatch.setattr(loop, "time", lambda: later)  # whatever clock still runs goes off
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(app.state.server.metrics.timed_out_requests.values())

    asyncio.run(main())


def test_a_place_is_free_before_the_last_byte_of_the_answer_leaves() -> None:
    """Who has read it may ask again at once, perhaps another API process."""
    ticket, seen = SimpleNamespace(released=False), []
    ticket.release = lambda: setattr(ticket, "released", True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["ticket"] = ticket
        await send({"type": "http.response.start", "status": 200})
        await scope["state"]["send_event"](b"event")
        await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    async def send(message: Any) -> None:
        seen.append((message.get("body"), ticket.released))

    metrics = HttpMetrics()
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(RequestMiddleware(app, metrics)(scope, None, send))  # type: ignore[arg-type]
    assert seen == [(None, False), (b"event", False), (b"piece", False), (b"end", True)]
    assert metrics.response_bytes["none"] == [1, len("eventpieceend")]
