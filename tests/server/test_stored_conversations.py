"""Stored conversations: bytes until they are rendered, off the event loop, bounded, cut by their sizes."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import threading
import weakref
from typing import Any

import httpx
import msgspec
import pytest

from vserve.server.api import responses
from vserve.server.dialects.pieces import PIECE, Pieces
from vserve.server.dialects.responses.history import History, newest
from vserve.server.dialects.responses.log import EventLog
from vserve.server.lanes import Lanes
from vserve.server.text.conversation import MAX_ARGUMENT_MARKS
from vserve.server.text.tokenizer import Tokenizer

from .test_response_store import create


def reasoning(size: int) -> dict[str, Any]:
    """What the template of the thinker leaves out where it is asked to; of this size."""
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * size}]}


def said(number: int, size: int = 10) -> dict[str, Any]:
    return {"role": "user", "content": f"{number} " + "x" * size}


def widen(engine: Any) -> None:
    """To a context that a few hundred thousand characters fit in."""
    engine.info = msgspec.structs.replace(engine.info, max_model_len=1 << 20, num_kv_tokens=1 << 22)


# ---- pieces ----


def test_pieces_are_the_list_again() -> None:
    entries = [{"id": f"e{i}", "text": "x" * (i * 700 % 5000)} for i in range(300)]
    entries.insert(100, {"id": "large", "text": "y" * 3 * PIECE})
    first, second = Pieces.of(entries[:150]), Pieces.of(entries[150:])
    whole = first + second
    assert list(whole.entries()) == entries and len(whole) == 301 and whole.ids() == [one["id"] for one in entries]
    assert whole.num_bytes == sum(map(len, whole.texts)) and len(whole.texts) > 8
    assert all(len(text) <= PIECE + 200 or count == 1 for text, count in zip(whole.texts, whole.counts, strict=True))
    assert whole.texts[: len(first.texts)] == first.texts and whole.texts[0] is first.texts[0], "they are shared"
    for places in ([0], [300], [299, 5, 100, 150], []):
        assert [msgspec.json.decode(one) for one in whole.read(places)] == [entries[place] for place in places]
    assert whole.last() == entries[-1:] and Pieces().last() == [] and Pieces().ids() == []


def test_the_latest_pieces_are_within_both_limits() -> None:
    pieces = Pieces.of([{"text": "x" * (PIECE - 100)} for _ in range(10)])
    assert len(pieces.texts) == 10
    assert len(pieces.latest(3 * PIECE, 100)) == 3 and len(pieces.latest(100 * PIECE, 4)) == 4
    assert pieces.latest(10, 100) == Pieces() and pieces.latest(100 * PIECE, 100) == pieces


def test_the_newest_turns_keep_the_system_message() -> None:
    system = {"role": "system", "content": "Be kind."}
    turns = [message for i in range(400) for message in (said(i, 1000), {"role": "assistant", "content": f"a{i}"})]
    pieces = Pieces.of([system, *turns])
    assert newest(pieces, pieces.num_bytes, 801) is pieces
    for num_bytes, num_messages in ((4 * PIECE, 801), (pieces.num_bytes, 300)):
        kept = list(newest(pieces, num_bytes, num_messages).entries())
        assert kept[0] == system and kept[1]["role"] == "user" and kept[-1] == turns[-1]
        assert kept[1:] == turns[-len(kept) + 1 :] and 100 < len(kept) <= 502
    assert list(newest(pieces, 10, 801).entries()) == [system]


def tool_turns(count: int) -> list[dict[str, Any]]:
    calls = [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "x" * 1000}]
    return [message for _ in range(count) for message in calls]


@pytest.mark.parametrize("asked", [0, 2 * PIECE])
def test_the_newest_user_message_stays_however_much_followed_it(asked: int) -> None:
    """An agent at work for long: the tools' answers alone are beyond the bound."""
    system = {"role": "system", "content": "Be kind."}
    pieces = Pieces.of([system, said(1), said(2, asked), *tool_turns(500)])
    for num_bytes, num_messages in ((4 * PIECE, 2000), (pieces.num_bytes, 300)):
        kept = list(newest(pieces, num_bytes, num_messages).entries())
        assert kept[:2] == [system, said(2, asked)] and kept[2:3] == [tool_turns(1)[0]]
        assert 50 < len(kept) <= num_messages + 1
    assert list(newest(pieces, 1000, 2000).entries()) == [system, *([] if asked else [said(2, 0)])]


def test_a_conversation_without_its_question_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "7"}
    first = create(client, [said(1, 50), call])
    goes_on = {"previous_response_id": first["id"], "truncation": "auto", "max_output_tokens": 2}
    state = client.app.state.server
    monkeypatch.setattr(responses, "MAX_ITEMS", 2)
    assert create(client, [output], **goes_on)["status"] in ("completed", "incomplete")
    monkeypatch.setattr(type(state), "max_body_size", lambda self: 60)
    refused = client.post("/v1/responses", {"input": [output], **goes_on})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "context_length_exceeded" and "60 bytes" in error["message"]
    assert create(client, [output, said(2)], **goes_on)["id"]


# ---- where the work is done ----


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each time that stored pieces are decoded."""
    idents: list[int] = []
    methods = {name: getattr(Pieces, name) for name in ("entries", "ids", "read")}
    for name in methods:

        def watched(self: Pieces, *arguments: Any, name: str = name) -> Any:
            if self.num_bytes > PIECE:
                idents.append(threading.get_ident())
            return methods[name](self, *arguments)

        monkeypatch.setattr(Pieces, name, watched)
    return idents


def test_what_is_stored_is_decoded_off_the_event_loop(thinking: Any, threads: list[int]) -> None:
    """However small the request is that goes on from it."""
    client, loop = thinking.client, threading.get_ident()
    widen(thinking.engine)
    first = create(client, [said(i, 2000) for i in range(100)])
    goes_on = {"input": "Hi", "previous_response_id": first["id"], "max_output_tokens": 2}
    path = f"/v1/responses/{first['id']}"
    asks = [
        lambda: client.post("/v1/responses", goes_on),
        lambda: client.post("/v1/responses", {**goes_on, "stream": True, "store": False}),
        lambda: client.post("/v1/responses", {**goes_on, "truncation": "auto"}),
        lambda: client.post("/v1/responses/input_tokens", {"input": "Hi", "previous_response_id": first["id"]}),
        lambda: client.post("/v1/responses/compact", {"input": "Hi", "previous_response_id": first["id"]}),
        lambda: client.get(f"{path}/input_items", params={"limit": 1}),
    ]
    for ask in asks:
        threads.clear()
        answer = ask()
        assert answer.status_code == 200, answer.text
        assert threads and loop not in threads
    for ask in (lambda: client.get(path), lambda: client.post(f"{path}/cancel")):
        threads.clear()
        assert ask().status_code in (200, 400) and not threads


def test_a_lane_knows_how_much_a_small_request_goes_on_from(thinking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widen(thinking.engine)
    first = create(thinking.client, [said(i, 2000) for i in range(100)])
    admitted: list[int] = []
    ranked: list[int] = []
    admission, run = thinking.state.admission, Lanes.run
    admit = admission.admit

    def let_in(num_requests: int, num_tokens: int, *arguments: Any, **options: Any) -> Any:
        admitted.append(num_tokens)
        return admit(num_requests, num_tokens, *arguments, **options)

    def ranks(self: Lanes, size: int, work: Any) -> Any:
        ranked.append(size)
        return run(self, size, work)

    monkeypatch.setattr(admission, "admit", let_in)
    monkeypatch.setattr(Lanes, "run", ranks)
    create(thinking.client, "Hi", previous_response_id=first["id"])
    assert admitted[0] > 50_000 and max(ranked) > 200_000


def test_a_request_that_runs_keeps_no_messages(serve: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while they are rendered: a hundred that wait would be a hundred copies of what they go on from."""

    class Messages(list):  # type: ignore[type-arg]
        """Which can be seen to be gone."""

    made: list[Any] = []
    ordinary = History.messages

    def watched(self: History, *arguments: Any) -> Any:
        messages = Messages(ordinary(self, *arguments))
        made.append(weakref.ref(messages))
        return messages

    monkeypatch.setattr(History, "messages", watched)

    async def test(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1/responses"
        async with httpx.AsyncClient() as http:
            first = (await http.post(base, json={"input": "Hi"})).json()
            made.clear()
            engine.delay = 0.3
            body = {"input": "Hi", "previous_response_id": first["id"], "max_output_tokens": 2}
            asking = asyncio.create_task(http.post(base, json=body))
            while not engine.num_open:
                await asyncio.sleep(0.01)
            gc.collect()
            assert made and all(messages() is None for messages in made)
            assert (await asking).status_code == 200

    serve(test)


# ---- bounds ----


def test_what_no_body_could_hold_goes_on_no_more(new_client: Any, engine: Any) -> None:
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4000)
    client = new_client(max_body_size=3000)
    system = {"role": "system", "content": "Be kind."}
    previous = create(client, [system, *(said(i, 200) for i in range(10))])
    grown = create(client, [said(10, 1000)], previous_response_id=previous["id"])
    assert client.get(f"/v1/responses/{grown['id']}").status_code == 200, "its answer is there all the same"
    goes_on = {"input": "Why?", "previous_response_id": grown["id"]}
    for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        answer = client.post(path, goes_on)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "previous_response_id", answer.text
        assert error["code"] == "context_length_exceeded" and "3000 (--max-body-size)" in error["message"]
        assert "in 14 messages" in error["message"] and "'truncation': 'auto'" in error["message"]
    for _ in range(6):
        grown = create(client, [said(10, 1000)], previous_response_id=grown["id"], truncation="auto")
        kept = client.app.state.server.responses.get(grown["id"], "").messages
        assert next(kept.entries()) == system and kept.num_bytes < 3000 + 1500, "nor does it grow for ever"


def test_many_empty_messages_go_on_no_more(client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.info = msgspec.structs.replace(engine.info, max_model_len=1000)
    monkeypatch.setattr("vserve.server.api.responses.MAX_ITEMS", 20)
    first = create(client, [{"role": "user", "content": ""}] * 10)
    second = create(client, [{"role": "user", "content": ""}] * 10, previous_response_id=first["id"])
    answer = client.post("/v1/responses", {"input": "Hi", "previous_response_id": second["id"]})
    assert answer.status_code == 400 and "in 22 messages" in answer.json()["error"]["message"]


def test_nothing_more_to_say(thinking: Any) -> None:
    first = create(thinking.client, "Hi")
    create(thinking.client, [], previous_response_id=first["id"], instructions="Be brief.")
    assert thinking.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello world!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert thinking.client.post("/v1/responses", {"input": []}).status_code == 400


# ---- truncation ----


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each prompt is made of."""
    counts: list[int] = []
    ordinary = Tokenizer.render

    def watched(self: Tokenizer, messages: Any, options: Any, *more: Any) -> str:
        counts.append(len(messages))
        return ordinary(self, messages, options, *more)

    monkeypatch.setattr(Tokenizer, "render", watched)
    return counts


@pytest.mark.parametrize("kind", ["empty", "thoughts", "growing", "long"])
def test_few_prompts_of_about_the_context_are_made(thinking: Any, rendered: list[int], kind: str) -> None:
    """Of 12,000 messages there were a dozen renderings, the first of them all."""
    limit = thinking.engine.info.max_model_len
    turns = {
        "empty": [{"role": "user", "content": ""}] * 12_000,
        "thoughts": [item for i in range(300) for item in (said(i), reasoning(300))],
        "growing": [said(i, i // 12) for i in range(3000)],
        "long": [said(i, 3 * limit) for i in range(100)] + [said(100)],
    }[kind]
    first = create(thinking.client, turns, truncation="auto", max_output_tokens=2)
    assert len(rendered) <= 8 and max(rendered) <= limit
    rendered.clear()
    create(thinking.client, "Hi", previous_response_id=first["id"], truncation="auto", max_output_tokens=2)
    assert len(rendered) <= 8 and max(rendered) <= limit
    assert "user\nHi<" in thinking.prompt
    if kind in ("empty", "growing"):
        assert len(thinking.engine.submitted[-1].token_ids) > limit * 3 // 4, "not much more is left out than must be"


# ---- events and status ----


def test_what_has_ended_is_not_looked_into(client: Any) -> None:
    store = client.app.state.server.responses
    response = create(client)
    path, owner = f"/v1/responses/{response['id']}", ""
    log = EventLog()
    for i in range(1000):
        log.add(b"event: %d\n\nevent: x\n\n" % i)
    log.end()
    stored = dataclasses.replace(store.get(response["id"], owner), answer=b"no JSON", log=log)
    assert stored.size > log.num_bytes
    store.put(response["id"], owner, stored)
    answer = client.post(f"{path}/cancel")
    assert answer.status_code == 400 and "has ended (completed)" in answer.json()["error"]["message"]
    log.events = Slices(log.events)  # type: ignore[assignment]
    assert client.get(path, params={"stream": "true", "starting_after": 1997}).text == "event: 999\n\nevent: x\n\n"
    assert client.get(path, params={"stream": "true", "starting_after": 100_000}).text == ""
    assert log.events.read == 2


class Slices(list[bytes]):
    """Says how many events were looked at."""

    read = 0

    def __getitem__(self, part: Any) -> Any:
        found = super().__getitem__(part)
        self.read += len(found)
        return found


# ---- values that nobody has counted ----


def test_values_within_a_text_are_counted_where_they_are_read(thinking: Any) -> None:
    many = "[" + "[]," * (MAX_ARGUMENT_MARKS // 2) + "[]]"
    function = {"name": "f", "arguments": f'{{"x":{many}}}'}
    calls = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}, calls]}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", **function}]}),
    ):
        error = thinking.client.post(path, body).json()["error"]
        assert error["code"] == "too_many_values" and str(MAX_ARGUMENT_MARKS) in error["message"], error
    broken = {"messages": [{"role": "assistant", "tool_calls": [7, {"function": 7}, {"function": function["name"]}]}]}
    assert thinking.client.post("/v1/chat/completions", broken).status_code == 400
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "structured_outputs": {"json": json.dumps({"x": "y" * (1 << 19)})},
    }
    answer = thinking.client.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and "524288 are allowed" in answer.json()["error"]["message"]
