"""Large bodies: read off the event loop, in pieces, and only where they do not have too many values."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import Request

from vserve.server.api import read as validation
from vserve.server.errors import ApiError, ClientDisconnected
from vserve.server.http import body as small_body
from vserve.server.http import large_body
from vserve.server.http.large_body import LARGE, MANY_COMMAS, MANY_VALUES, MAX_VALUES, PIECE
from vserve.server.wire.embeddings import EmbeddingRequest
from vserve.server.wire.requests import ChatRequest, CompletionRequest
from vserve.server.wire.tokens import MAX_TOKENS

JSON = {"content-type": "application/json"}
PLAIN = [1, -2.5, "", "a", 'x\\"y', "\\", "\\\\", '":', "{[,", "é\n", None, True, "[1,2]" * 20]


def value(random: random.Random, depth: int = 0) -> Any:
    kind = random.random()
    if depth > 5 or kind < 0.3:
        return random.choice(PLAIN)
    if kind < 0.55:
        return {f"{random.choice(PLAIN)}{i}": value(random, depth + 1) for i in range(random.randrange(6))}
    if kind < 0.75:
        return [random.randrange(1000) for _ in range(random.randrange(80))]
    return [value(random, depth + 1) for _ in range(random.randrange(8))]


def outcome(decode: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return decode(raw)
    except ApiError:
        return ApiError


def test_it_is_read_as_a_small_body_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_body, "PIECE", 64)
    source = random.Random(1)
    num_broken = 0
    for _ in range(1500):
        made = value(source)
        raw = bytearray(json.dumps(made, ensure_ascii=source.random() < 0.5, indent=source.choice((None, 2))).encode())
        assert large_body.decode(bytes(raw)) == made
        for _ in range(source.randint(1, 2)):
            raw[source.randrange(len(raw))] = source.choice(b'{}[],:"\\1a ')
        expected = outcome(small_body.decode, bytes(raw))
        assert outcome(large_body.decode, bytes(raw)) == expected, bytes(raw)
        num_broken += expected is ApiError
    assert 300 < num_broken < 1400


@pytest.mark.parametrize(
    "raw",
    [
        b"[%b]" % (b"11," * 131_076),
        b"[%b ]" % (b"11," * 131_076),
        b"[%b,11]" % (b" " * LARGE),
        b"[11,%b,11]" % (b" " * LARGE),
        b"[%b11,%b]" % (b"11," * 131_075, b" " * LARGE),
    ],
    ids=["trailing", "space", "first", "between", "last"],
)
def test_a_comma_where_a_piece_ends_needs_an_entry(raw: bytes) -> None:
    assert len(raw) > LARGE
    for decode in (small_body.decode, large_body.decode):
        with pytest.raises(ApiError) as refused:
            decode(raw)
        assert refused.value.code == "invalid_json"


def test_an_empty_list_of_many_bytes() -> None:
    assert large_body.decode(b"[%b]" % (b" " * LARGE)) == []


def test_a_key_that_comes_twice() -> None:
    raw = b'{"x":[%b],"y":[{"a":1,"a":2}]}' % b",".join([b"1"] * 200_000)
    assert len(raw) > LARGE
    with pytest.raises(ApiError, match="comes twice"):
        large_body.decode(raw)
    named = b'{"x":[%b],"y":[{"alpha":1,"alpha":2}]}' % b",".join([b"1"] * 100_000)
    assert len(named) < LARGE and large_body.work_of(named)
    for decode in (large_body.decode, small_body.decode):
        with pytest.raises(ApiError, match="the key 'alpha' comes twice"):
            decode(named)


def test_numbers_that_take_long(client: Any, costs_at_most: Any) -> None:
    """A small body of those that msgspec needs 10 µs for took 0.3 s of the event loop."""
    raw = b'{"prompt":"Hello","x":[%b]}' % b",".join([b"1e300"] * 40_000)
    assert len(raw) < LARGE

    def seconds(decode: Any) -> float:
        begun = time.thread_time()
        assert decode(raw)["x"] == [1e300] * 40_000
        return time.thread_time() - begun

    assert costs_at_most(1 / 3, lambda: seconds(small_body.decode), lambda: seconds(msgspec.json.decode))
    refused = client.post("/v1/completions", content=b'{"prompt":"Hello","temperature":1e999}', headers=JSON)
    assert refused.status_code == 400 and "out of range" in refused.json()["error"]["message"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PARAMETERS = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "description": "long " * 20, "enum": ["a", "b"]} for i in range(10)},
    "required": ["p0"],
}
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": PARAMETERS}} for i in range(200)]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": list(range(1000, 132_072))}),
        (CompletionRequest, {"prompt": [list(range(2000))] * 1024}),
        (CompletionRequest, {"prompt": "if (a[0]) { b = {1, 2, \"c\"}; }\n" * 40_000}),
        (ChatRequest, {"messages": [user("How are you?"), {"role": "assistant", "content": "Well."}] * 6000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "long " * 20}]}] * 8000}),
        (ChatRequest, {"messages": [user("Hi")], "tools": TOOLS}),
        (EmbeddingRequest, {"input": ["some text " * 20] * 2048}),
        (EmbeddingRequest, {"input": [list(range(300))] * 2048}),
    ],
)  # fmt: skip
def test_what_people_send_is_read(model: Any, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    assert len(raw) > LARGE
    read = model.model_validate(large_body.decode(raw))
    for name, sent in body.items():
        got = getattr(read, name)
        assert len(got) == len(sent) or [sent] == got


@pytest.mark.parametrize(
    "inner",
    [
        b"[%b]" % b",".join([b"{}"] * 200_000),
        b"[%b]" % b",".join([b'"a"'] * 200_000),
        b"{%b}" % b",".join(b'"%d":1' % i for i in range(200_000)),
        b"[[],%b]" % b",".join([b"1"] * 200_000),
        b"[%b]" % b",".join([b"[%b]" % b",".join([b"1"] * 4)] * 200_000),
    ],
    ids=["objects", "strings", "keys", "mixed", "lists"],
)
def test_too_many_values_are_refused_before_one_is_made(
    client: Any, monkeypatch: pytest.MonkeyPatch, inner: bytes
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(large_body, "_read", lambda raw, depth: read.append(raw))
    answer = client.post("/v1/completions", content=b'{"prompt":"Hello","x":%b}' % inner, headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "too_many_values" and str(MAX_VALUES) in error["message"]
    assert not read


def test_too_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_body, "MAX_NUMBERS", 1000)
    numbers = b",".join([b"1"] * 600)
    assert large_body.decode(b'{"prompt":[%b]}' % numbers) == {"prompt": [1] * 600}
    with pytest.raises(ApiError, match="more than 1000 numbers"):
        large_body.decode(b'{"prompt":[[%b],[%b]]}' % (numbers, numbers))


@pytest.mark.parametrize("nested", [False, True])
def test_numbers_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, nested: bool) -> None:
    """While C reads one, no other thread runs."""
    sizes = []

    def parse(raw: bytes) -> Any:
        sizes.append(len(raw))
        return small_body.parse(raw)

    monkeypatch.setattr(large_body, "parse", parse)
    ids = list(range(1000, 2000)) * 300
    prompt = [ids, ids] if nested else ids
    assert large_body.decode(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}
    assert max(sizes) < PIECE + 100 and len(sizes) > 20


USERS = b",".join([b'{"role":"user","content":"a"}'] * 25_000)
LONG = b",".join([b"100"] * 1_000_000)
WORST: dict[str, tuple[str, bytes, int]] = {
    "objects": ("/v1/chat/completions", b'{"messages":[%b]}' % b",".join([b"{}"] * (1 << 20)), 400),
    "messages": ("/v1/chat/completions", b'{"messages":[%b]}' % USERS, 400),
    "responses": ("/v1/responses", b'{"input":[%b]}' % USERS, 400),
    "claude": ("/v1/messages", b'{"max_tokens":5,"messages":[%b]}' % USERS, 400),
    "few bytes": ("/v1/chat/completions", b'{"messages":[%b]}' % USERS[:240_000].rpartition(b",")[0], 400),
    "items": ("/v1/responses", b'{"input":[%b]}' % USERS[:240_000].rpartition(b",")[0], 400),
    "fields": ("/v1/completions", b'{"prompt":"a",%b}' % b",".join(b'"k%d":1' % i for i in range(20_000)), 200),
    "ids": ("/detokenize", b'{"tokens":[%b]}' % LONG, 200),
    "foreign ids": ("/detokenize", b'{"tokens":[%b,1000]}' % LONG, 400),
    "no ids": ("/detokenize", b'{"tokens":[%b]}' % b",".join([b"1.5"] * 400_000), 400),
    "prompts": ("/v1/completions", b'{"prompt":[[%b,1000]]}' % LONG, 400),
    "a wrong field": ("/v1/completions", b'{"prompt":"a","temperature":[%b]}' % b",".join([b"1.5"] * 400_000), 400),
    "no stop tokens": ("/v1/messages", b'{"max_tokens":5,"messages":[{"role":"user","content":"a"}],'
                       b'"stop_token_ids":[%b]}' % b",".join([b"1.5"] * 200_000), 400),
    "bad words": (
        "/v1/completions", json.dumps({"prompt": "a", "bad_words": [f"{i} " * 250 for i in range(256)]}).encode(), 200
    ),
    "tokenize": ("/tokenize", json.dumps({"prompt": "a b " * 60_000, "return_token_strs": True}).encode(), 200),
}  # fmt: skip


@pytest.mark.parametrize("kind", WORST)
@pytest.mark.slow
def test_the_event_loop_goes_on(app: Any, kind: str, slowness: float, settles_within: Any) -> None:
    """Whatever the event loop's own thread does between two turns takes little of its processor's time; the tokenizer
    of these tests is slow, what is large here is small for a real one."""
    path, raw, status = WORST[kind]

    async def watch() -> None:
        nonlocal longest
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=60) as http:
            await http.post("/v1/completions", json={"prompt": "Hello"})  # what is made once, is
            watching = asyncio.create_task(watch())
            await asyncio.sleep(0)  # so that it sees the first turn
            answer = await http.post(path, content=raw, headers={"content-type": "application/json"})
            await asyncio.sleep(0)  # and the last one
            watching.cancel()
            assert answer.status_code == status, answer.text[:300]

    def measure() -> float:
        nonlocal longest
        longest = 0.0
        gc.collect()
        gc.freeze()  # as a server does when it is ready
        try:
            asyncio.run(main())
        finally:
            gc.unfreeze()
        return longest

    longest = 0.0
    assert settles_within(0.02 * slowness, measure)


def test_small_bodies_do_not_change_threads(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    validated = validation.validated

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return validated(*arguments)

    monkeypatch.setattr(validation, "validated", watched)
    assert client.complete().status_code == 200
    assert client.complete(user="x", ignored="y" * LARGE).status_code == 200
    assert client.complete(user="x", ignored=[[]] * MANY_VALUES).status_code == 200
    assert client.complete(ignored={f"k{i}": 1 for i in range(2 * MANY_VALUES)}).status_code == 200
    assert client.complete(ignored=[1] * (MANY_COMMAS + 1)).status_code == 200
    assert threads[0] == threading.current_thread().name and len(threads) == 5
    assert all(name.startswith("read") for name in threads[1:])


@pytest.mark.parametrize(
    "inner",
    [
        b"[%b]" % b",".join([b'{"role":"user","content":""}'] * (MANY_VALUES // 5 - 2)),
        b"{%b}" % b",".join(b'"k%d":1' % i for i in range(MANY_VALUES - 20)),
        b"[%b]" % b",".join([b"1e300"] * MANY_COMMAS),
        b'"%b"' % (b"x" * (LARGE - 100)),
    ],
    ids=["messages", "keys", "numbers", "text"],
)
def test_what_the_event_loop_reads_itself_is_soon_read(inner: bytes, slowness: float, settles_within: Any) -> None:
    """The most that is let through, validated too."""
    raws = [b'{"prompt":"a","x":%b}' % inner, b'{"messages":%b}' % inner]
    assert not any(map(large_body.work_of, raws))

    def measure() -> float:
        begun = time.thread_time()
        CompletionRequest.model_validate(small_body.decode(raws[0]))
        if inner.startswith(b"[{"):
            ChatRequest.model_validate(small_body.decode(raws[1]))
        return time.thread_time() - begun

    assert settles_within(0.01 * slowness, measure)


def test_how_many_ids_become_text(client: Any) -> None:
    content = b'{"tokens":[%b]}' % b",".join([b"1"] * (MAX_TOKENS + 1))
    answer = client.post("/detokenize", content=content, headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tokens"
    assert str(MAX_TOKENS) in error["message"] and str(MAX_TOKENS + 1) in error["message"]


@pytest.mark.parametrize(
    ("option", "context", "limit"),
    [(None, 128, 8 << 20), (None, 131_072, 8 << 20), (None, 10**6, 64 * 10**6), (1000, 10**6, 1000)],
)
def test_the_limit_of_bodies_follows_the_context(
    new_client: Any, engine: Any, option: int | None, context: int, limit: int
) -> None:
    engine.info = msgspec.structs.replace(engine.info, max_model_len=context)
    client = new_client(max_body_size=option)
    for size, status in ((limit, 200), (limit + 1, 413)):
        headers = {"content-type": "application/json", "content-length": str(size)}
        answer = client.post("/v1/completions", content=b'{"prompt":"Hello"}', headers=headers)
        assert answer.status_code == status
    assert f"{limit} bytes" in answer.json()["error"]["message"] and "--max-body-size" in answer.text


def test_a_body_that_nobody_waits_for_is_not_kept(app: Any) -> None:
    """Its thread is busy, its client leaves: what waits for the thread lets go of it at once."""

    class Body:
        """Stands for the bytes."""

    async def main() -> bool:
        busy = threading.Event()
        held = [asyncio.create_task(app.state.server.bodies.run(2 * LARGE, busy.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        body = Body()
        gone = weakref.ref(body)
        leaves = asyncio.Event()

        async def receive() -> dict[str, str]:
            await leaves.wait()
            return {"type": "http.disconnect"}

        request = Request({"type": "http", "app": app, "state": {"body_work": 2 * LARGE}}, receive)
        waiting = asyncio.create_task(validation.work_on_body(request, lambda body=body: body))
        del body
        await asyncio.sleep(0.05)
        leaves.set()
        await asyncio.wait([waiting])
        error = waiting.exception()
        assert isinstance(error, ClientDisconnected)
        error.__traceback__ = None  # whose frames know the body
        del waiting, error
        gc.collect()
        left = gone() is None
        busy.set()
        await asyncio.wait(held)
        return left

    assert asyncio.run(main())
