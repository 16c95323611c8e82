"""Threads for what takes long: who comes first, who is not begun, who is refused, and how much of a text is read."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.link.turns import SHORT_TURN, USUAL_TURN, short_turns
from vserve.server import lanes
from vserve.server.app import create_app
from vserve.server.errors import ApiError
from vserve.server.http import body_limit
from vserve.server.lanes import SHORT, Lanes
from vserve.server.options.config import ServerConfig
from vserve.server.text import encoding
from vserve.server.text.encoding import TURN, Encoder
from vserve.server.text.tokenizer import Tokenizer

LONG = SHORT + 1


def run(test: Callable[[Lanes], Any], num_threads: int = 2) -> None:
    async def main() -> None:
        made = Lanes(num_threads)
        try:
            await asyncio.wait_for(test(made), 60)
        finally:
            made.close()

    asyncio.run(main())


class Gate:
    """Work that lasts until it is opened."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.open.wait(60)
        return "through"


async def begun(gate: Gate) -> None:
    while not gate.begun.is_set():
        await asyncio.sleep(0.001)


def test_short_work_passes_any_long_work() -> None:
    async def test(made: Lanes) -> None:
        gate = Gate()
        blocked = [asyncio.create_task(made.run(LONG, gate)) for _ in range(5)]
        await begun(gate)
        assert await made.run(10, lambda: "short") == "short"
        assert made.num_running == 1  # one thread is never at long work
        gate.open.set()
        assert await asyncio.gather(*blocked) == ["through"] * 5
        assert made.num_running == made.waiting_size == 0

    run(test)


def test_the_shorter_of_the_long_ones_comes_first_but_none_waits_for_ever() -> None:
    async def test(made: Lanes) -> None:
        gate, order = Gate(), []
        tasks = [asyncio.create_task(made.run(LONG, gate))]
        await begun(gate)
        for size in (3 * LONG, LONG, 2 * LONG):
            tasks.append(asyncio.create_task(made.run(size, lambda size=size: order.append(size))))
            await asyncio.sleep(0)
        await asyncio.sleep(4 * LONG / lanes.CHARACTERS_A_SECOND)
        tasks.append(asyncio.create_task(made.run(LONG, lambda: order.append("late"))))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)
        assert order == [LONG, 2 * LONG, 3 * LONG, "late"]

    run(test)


def test_who_has_left_is_not_begun() -> None:
    async def test(made: Lanes) -> None:
        gate, done = Gate(), []
        running = asyncio.create_task(made.run(LONG, gate))
        await begun(gate)
        waiting = [asyncio.create_task(made.run(LONG, lambda i=i: done.append(i))) for i in range(3)]
        await asyncio.sleep(0)
        assert made.waiting_size == 3 * LONG
        waiting[0].cancel()
        running.cancel()  # it is under way, but nobody waits for it any more
        await asyncio.wait((waiting[0], running))
        assert waiting[0].cancelled() and running.cancelled()
        assert made.waiting_size == 2 * LONG and made.num_running == 1
        gate.open.set()
        await asyncio.gather(*waiting[1:])
        assert done == [1, 2]

    run(test)


def test_the_text_of_who_has_left_is_not_kept() -> None:
    async def test(made: Lanes) -> None:
        gate, unwanted = Gate(), Gate()
        running = asyncio.create_task(made.run(LONG, gate))
        await begun(gate)
        text = weakref.ref(unwanted)
        waiting = asyncio.create_task(made.run(LONG, unwanted))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        del waiting, unwanted
        gc.collect()
        assert text() is None
        gate.open.set()
        assert await running == "through"

    run(test)


def test_what_fails_fails_alone() -> None:
    async def test(made: Lanes) -> None:
        def fail() -> None:
            raise KeyError("x")

        for size in (10, LONG):
            with pytest.raises(KeyError):
                await made.run(size, fail)
        assert await made.run(LONG, lambda: 7) == 7

    run(test)


def test_too_much_waiting_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING", 3 * LONG)

    async def test(made: Lanes) -> None:
        gate = Gate()
        tasks = [asyncio.create_task(made.run(LONG, gate)) for _ in range(4)]
        await begun(gate)
        with pytest.raises(ApiError) as refused:
            await made.run(LONG, gate)
        assert refused.value.status == 429 and refused.value.code == "queue_full"
        assert str(3 * LONG) in refused.value.message and "retry-after" in refused.value.headers
        assert await made.run(10, lambda: "short") == "short"
        gate.open.set()
        await asyncio.gather(*tasks)

    run(test)


async def give(made: Lanes, tenant: int, size: int, work: Callable[[], Any]) -> asyncio.Task[Any]:
    """It waits, or is at work."""

    async def run() -> Any:
        lanes.TENANT.set(tenant)
        return await made.run(size, work)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("size", [10, LONG])
def test_keys_and_addresses_have_turns(size: int) -> None:
    async def test(made: Lanes) -> None:
        gate, order = Gate(), []
        tasks = [await give(made, 1, size, gate) for _ in range(2)]
        await begun(gate)
        for tenant in (1,) * 40 + (2, 3, 2):
            tasks.append(await give(made, tenant, size, lambda tenant=tenant: order.append(tenant)))
        gate.open.set()
        await asyncio.gather(*tasks)
        assert order.index(2) < 5 and order.index(3) < 5 and [i for i, tenant in enumerate(order) if tenant == 2][1] < 8

    run(test)


def test_work_is_that_of_the_key(new_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, tenants, ordinary = new_client(api_key=("first", "second")), [], Lanes.run

    def run(self: Lanes, size: int, work: Any) -> Any:
        tenants.append(lanes.TENANT.get())
        return ordinary(self, size, work)

    monkeypatch.setattr(Lanes, "run", run)
    for key in ("first", "second", "first"):
        headers = {"authorization": f"Bearer {key}"}
        assert client.post("/tokenize", {"prompt": "long " * 1000}, headers=headers).status_code == 200
    assert len(set(tenants)) == 2 and 0 not in tenants


def test_turns_are_short_until_the_last_long_work_has_ended() -> None:
    """With --engine-in-process adapters are read in the same process."""

    async def test(made: Lanes) -> None:
        assert await made.run(SHORT, sys.getswitchinterval) == USUAL_TURN
        with short_turns():
            assert await made.run(LONG, sys.getswitchinterval) == SHORT_TURN
            assert sys.getswitchinterval() == SHORT_TURN
        gate = Gate()
        working = await give(made, 0, LONG, gate)
        await begun(gate)
        with short_turns():
            pass
        assert sys.getswitchinterval() == SHORT_TURN
        gate.open.set()
        await working
        assert sys.getswitchinterval() == USUAL_TURN

    run(test)


def test_whose_text_waits_most_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant cannot take the room for all: of its own the latest leaves, and hears why."""
    monkeypatch.setattr(lanes, "MAX_WAITING", 4 * LONG)

    async def test(made: Lanes) -> None:
        gate = Gate()
        many = [await give(made, 1, LONG, gate) for _ in range(5)]  # one of them is at work
        await begun(gate)
        one = await give(made, 2, LONG, lambda: "one")
        with pytest.raises(ApiError) as refused:
            await many[-1]
        assert refused.value.status == 429 and refused.value.code == "queue_full"
        assert made.waiting_size == 4 * LONG
        with pytest.raises(ApiError):
            await (await give(made, 1, LONG, gate))
        gate.open.set()
        assert await asyncio.gather(one, *many[:-1]) == ["one"] + ["through"] * 4
        assert made.waiting_size == 0 and not made._held

    run(test)


def test_nobody_gives_way_to_who_finds_no_room_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING", 8 * LONG)

    async def test(made: Lanes) -> None:
        refusals: list[int] = []
        made._rejected = lambda: refusals.append(1)  # type: ignore[method-assign]
        gate = Gate()
        working = await give(made, 1, LONG, gate)
        await begun(gate)
        waiting = [await give(made, tenant, LONG, gate) for tenant in (1, 2) * 4]
        for size in (3 * LONG, 9 * LONG):  # the first has room once two have left, and would have most before that
            with pytest.raises(ApiError) as refused:
                await (await give(made, 3, size, gate))
            assert refused.value.code == "queue_full"
        await asyncio.sleep(0)
        assert made.waiting_size == 8 * LONG and not any(task.done() for task in waiting)
        assert len(refusals) == 2, "one for each who was refused"
        small = await give(made, 3, 2 * LONG, gate)
        assert made.waiting_size == 8 * LONG and len(refusals) == 4
        gate.open.set()
        ends = await asyncio.gather(working, small, *waiting, return_exceptions=True)
        refused_ones = [i for i, end in enumerate(ends[2:]) if isinstance(end, ApiError)]
        assert refused_ones == [6, 7] and ends.count("through") == 8, "the latest of each"

    run(test)


@pytest.mark.parametrize(
    ("name", "size", "threads"),
    [("tokenizer_pool_size", 0, lanes.NUM_THREADS), ("tokenizer_pool_size", 1, 1), ("renderer_num_workers", 7, 7)],
)
def test_the_pool_has_the_size_that_was_asked_for(new_client: Any, name: str, size: int, threads: int) -> None:
    client = new_client(**{name: size})
    made = client.app.state.server.lanes

    async def most_at_once() -> int:
        gate = Gate()
        tasks = [asyncio.create_task(made.run(10, gate)) for _ in range(10)]
        await begun(gate)
        running: int = made.num_running
        await asyncio.sleep(0.05)
        gate.open.set()
        await asyncio.gather(*tasks)
        return running

    assert client.run(most_at_once()) == threads
    text = client.get("/metrics").text
    total, count = (
        float(re.search(rf"vllm:tokenizer_queue_seconds_{what}{{.*}} (\S+)", text)[1])  # type: ignore[index]
        for what in ("sum", "count")
    )
    assert count == 10 and total >= 0.05 * (10 - threads)


def test_the_pool_has_one_size() -> None:
    with pytest.raises(ConfigError, match="--tokenizer-pool-size and --renderer-num-workers are one"):
        ServerConfig(tokenizer_pool_size=2, renderer_num_workers=2)


def test_whom_there_is_no_room_for_is_counted(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = client.app.state.server

    async def refused() -> int:
        state.lanes.waiting_size = lanes.MAX_WAITING
        try:
            await state.lanes.run(LONG, lambda: None)
        except ApiError as error:
            return error.status
        finally:
            state.lanes.waiting_size = 0
        return 200

    assert client.run(refused()) == 429
    monkeypatch.setattr(body_limit, "AT_LEAST", 0)
    monkeypatch.setattr(body_limit, "TOGETHER", 1)  # none of it is for one alone
    assert client.complete(user="u" * (body_limit.SMALL + 1)).status_code == 429
    text = client.get("/metrics").text
    for reason in ("queued_text", "bodies"):
        (line,) = [line for line in text.splitlines() if f'reason="{reason}"' in line and "_total{" in line]
        assert line.startswith("vllm:requests_rejected_total{") and line.endswith(" 1.0")


def test_at_the_end_nobody_waits() -> None:
    async def test(made: Lanes) -> None:
        gate = Gate()
        tasks = [asyncio.create_task(made.run(size, gate)) for size in (10, LONG, LONG, LONG)]
        await begun(gate)
        made.fail(KeyError("over"))
        ends = await asyncio.gather(*tasks, made.run(10, gate), return_exceptions=True)
        assert [type(end) for end in ends] == [KeyError] * 5 and not made.waiting_size
        gate.open.set()

    run(test)


# ---- texts ----

WORDS = "Hello world! The answer is 42. "


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that the tokenizer reads."""
    lengths: list[int] = []

    def watched(name: str) -> Any:
        method = getattr(Tokenizer, name)

        def call(self: Tokenizer, text: str, *arguments: Any) -> Any:
            lengths.append(len(text))
            return method(self, text, *arguments)

        return call

    for name in ("encode", "count"):
        monkeypatch.setattr(Tokenizer, name, watched(name))
    return lengths


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "TEXT"}),
        ("/v1/completions", {"prompt": ["Hi", "TEXT"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "TEXT"}),
        ("/v1/responses", {"input": "TEXT", "truncation": "auto"}),
        ("/v1/embeddings", {"input": ["Hi", "TEXT"]}),
    ],
)
def test_of_a_text_that_is_too_long_only_the_beginning_is_read(
    client: Any, tokenised: list[int], path: str, fields: dict[str, Any]
) -> None:
    text = WORDS * (3 * TURN // len(WORDS))
    raw = msgspec.json.encode(fields).replace(b"TEXT", text.encode())
    answer = client.post(path, content=raw, headers={"content-type": "application/json"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("This model's maximum context length is 128 tokens.")
    assert re.search(rf"of {str(len(text))[:4]}\d\d characters", message) and "Please reduce the length" in message
    assert sum(tokenised) <= TURN + 100


def test_a_text_that_no_context_holds_is_not_read_at_all(
    client: Any, tokenised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "FREE", TURN)
    for body in ({"prompt": "a" * (TURN + 1)}, {"prompt": "a" * (TURN + 1), "truncate_prompt_tokens": 5}):
        error = client.post("/v1/completions", body).json()["error"]
        assert error["param"] == "prompt" and str(TURN) in error["message"] and str(TURN + 1) in error["message"]
    assert not tokenised


def test_a_long_text_that_fits_has_the_tokens_that_it_has_in_one_go(
    text_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "TURN", 8192)
    monkeypatch.setattr(encoding, "USUAL", 1)
    tokenizer = text_model.tokenizer
    text = WORDS * (20_000 // len(WORDS))
    whole = tokenizer.encode(text, True)

    async def test(made: Lanes) -> None:
        # So that it is looked at in pieces first: it has more characters a token than most.
        encoder = Encoder(made, tokenizer, len(whole), "prompt")
        assert await encoder.encode(text, True) == whole
        prompts = ["Hi", text, [1, 2], "Ho", text, ""]
        expected = [tokenizer.encode(p, True) if isinstance(p, str) else p for p in prompts]
        assert await encoder.encode_all(prompts, True) == expected
        with pytest.raises(ApiError):
            await Encoder(made, tokenizer, len(whole) // 2, "prompt").encode(text, True)

    run(test)


def test_many_texts_are_read_in_turns(text_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    async def test(made: Lanes) -> None:
        ordinary = made.run

        def watched(size: int, work: Any) -> Any:
            sizes.append(size)
            return ordinary(size, work)

        monkeypatch.setattr(made, "run", watched)
        prompts = [WORDS * 100] * 200
        encoder = Encoder(made, text_model.tokenizer, 10_000, "input")
        assert await encoder.encode_all(prompts, False) == [text_model.tokenizer.encode(WORDS * 100, False)] * 200

    run(test)
    assert sum(sizes) == 200 * 100 * len(WORDS) and max(sizes) <= TURN


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "long " * 1000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "long " * 1000}]}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "long " * 1000}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "long " * 1000}]}),
        ("/v1/completions", {"prompt": "long " * 1000}),
    ],
)
def test_who_leaves_while_others_are_tokenised_is_not_waited_for(
    serve: Any, app: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    from .test_disconnect import send, until

    server = app.state.server
    gates = [Gate() for _ in range(lanes.NUM_THREADS)]
    num_encoded = 0

    def encode(self: Tokenizer, text: str, special: bool) -> list[int]:
        nonlocal num_encoded
        num_encoded += 1
        return [5]

    monkeypatch.setattr(Tokenizer, "encode", encode)

    async def test(port: int) -> None:
        blocked = [asyncio.create_task(server.lanes.run(10, gate)) for gate in gates]
        await until(lambda: all(gate.begun.is_set() for gate in gates))
        _, writer = await send(port, path, body)
        await until(lambda: len(server.lanes._short) == 1)
        writer.close()
        (entry,) = server.lanes._short
        await until(entry[3].done.cancelled)
        for gate in gates:
            gate.open.set()
        await asyncio.gather(*blocked)
        assert await server.lanes.run(10, lambda: 7) == 7
        assert not num_encoded

    serve(test)


def test_short_requests_are_answered_while_long_ones_are_tokenised(
    engine: Any, text_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six texts, more than there are threads; then one of a few pages."""
    gate = Gate()
    app = create_app(engine, ServerConfig(max_num_queued_tokens=0), text_model)
    engine.info = msgspec.structs.replace(engine.info, max_model_len=10**6)
    ordinary = Tokenizer.encode

    def encode(self: Tokenizer, text: str, special: bool) -> list[int]:
        return [gate() and 5] if len(text) > SHORT else ordinary(self, text, special)

    monkeypatch.setattr(Tokenizer, "encode", encode)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=60) as http:
            long = [asyncio.create_task(http.post("/v1/completions", json={"prompt": "a" * LONG})) for _ in range(6)]
            await begun(gate)
            short = await http.post("/v1/completions", json={"prompt": "a b " * 1000})
            assert short.status_code == 200 and not any(task.done() for task in long)
            gate.open.set()
            assert [answer.status_code for answer in await asyncio.gather(*long)] == [200] * 6

    asyncio.run(asyncio.wait_for(main(), 60))
