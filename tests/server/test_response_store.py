"""Stored responses: going on from one, reading, deleting, cancelling; how many there may be, and whose they are."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from vserve.server.dialects.pieces import Pieces
from vserve.server.dialects.store import Store, Stored


def create(client: Any, input: Any = "Hi", **body: Any) -> dict[str, Any]:
    options = {"headers": body.pop("headers")} if "headers" in body else {}
    answer = client.post("/v1/responses", {"input": input, **body}, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(thinking: Any, stream: bool) -> None:
    client = thinking.client
    thinking.says("<think>Hm</think>I am fine.")
    if stream:
        answer = client.post("/v1/responses", {"input": "How?", "instructions": "Be brief.", "stream": True})
        first = json.loads(answer.text.split("\n\n")[-2].partition("data: ")[2])["response"]
    else:
        first = create(client, "How?", instructions="Be brief.")
    second = create(client, "Why?", previous_response_id=first["id"])
    begin = (
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n<think>Hm</think>I am fine.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert thinking.prompt == begin, "instructions are of one response only"
    create(client, "Oh", previous_response_id=second["id"])
    assert thinking.prompt.startswith(begin + "<think>Hm</think>I am fine.<|im_end|>\n<|im_start|>user\nOh")
    assert second["previous_response_id"] == first["id"]


def test_a_tool_loop(thinking: Any) -> None:
    tool = {"type": "function", "name": "get_weather"}
    thinking.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    first = create(thinking.client, "Weather?", tools=[tool])
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    thinking.says("Sun.")
    second = create(thinking.client, [result], tools=[tool], previous_response_id=first["id"])
    assert (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n" in thinking.prompt
    )
    assert second["output"][0]["content"][0]["text"] == "Sun."


def test_read_and_delete(client: Any) -> None:
    response = create(client)
    path = f"/v1/responses/{response['id']}"
    assert client.get(path).json() == response
    assert client.get(path, params={"stream": "true"}).status_code == 400
    answer = client.post(f"{path}/cancel")
    assert answer.status_code == 400 and "has ended (completed)" in answer.json()["error"]["message"]
    assert client.get(path).json() == response, "what has ended stays as it is"
    assert client.request("DELETE", path).json() == {"id": response["id"], "object": "response", "deleted": True}
    for method, gone in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        answer = client.request(method, gone)
        assert answer.status_code == 404 and response["id"] in answer.json()["error"]["message"]


@pytest.mark.parametrize(("tag", "kept"), [("0a1b2c3d", "0a1b2c3d"), ("0A1B2C3D", ""), ("0a1b2c3d4", ""), ("", "")])
def test_its_id_has_the_tag_with_which_a_router_finds_its_server(client: Any, tag: str, kept: str) -> None:
    ids = [create(client, headers={"x-server-tag": tag, "x-request-id": "mine"})["id"] for _ in range(2)]
    assert all(re.fullmatch(f"resp_{kept}[0-9a-f]{{32}}", id) for id in ids)
    assert ids[0] != ids[1], "none is made of a client's words alone"
    assert client.get(f"/v1/responses/{ids[0]}").json()["id"] == ids[0]


def test_what_it_was_made_of(client: Any, engine: Any) -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ho"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
    ]
    first = create(client, items)
    second = create(client, "And now?", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    page = client.get(path, params={"order": "asc"}).json()
    said = [(item["role"], item["content"][0]["text"]) for item in page["data"]]
    assert said == [
        ("user", "Hi"), ("assistant", "Ho"), ("user", "Why?"), ("assistant", "Hello world!"), ("user", "And now?"),
    ]  # fmt: skip
    ids = [item["id"] for item in page["data"]]
    assert len(set(ids)) == 5 and (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[-1], False)
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "Hi"}]
    latest = client.get(path, params={"limit": 2}).json()
    assert [item["id"] for item in latest["data"]] == ids[:2:-1] and latest["has_more"]
    rest = client.get(path, params={"limit": 3, "after": latest["last_id"]}).json()
    assert [item["id"] for item in rest["data"]] == ids[2::-1] and not rest["has_more"]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_other"}):
        answer = client.get(path, params=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(wrong))
    assert client.get("/v1/responses/resp_other/input_items").status_code == 404


def test_tokens_of_an_input(client: Any, engine: Any) -> None:
    body = {"input": "How many?", "instructions": "Be brief."}
    answer = client.post("/v1/responses/input_tokens", body).json()
    first = create(client, body["input"], instructions=body["instructions"])
    num_tokens = len(engine.submitted[-1].token_ids)
    assert answer == {"object": "response.input_tokens", "input_tokens": num_tokens}
    more = {"input": "Why?", "previous_response_id": first["id"]}
    asked = client.post("/v1/responses/input_tokens", more).json()["input_tokens"]
    create(client, **more)
    assert asked == len(engine.submitted[-1].token_ids) and len(engine.submitted) == 2
    wrong = client.post("/v1/responses/input_tokens", {"input": 7})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input"


def test_not_stored(client: Any) -> None:
    response = create(client, store=False)
    assert response["store"] is False and client.get(f"/v1/responses/{response['id']}").status_code == 404


def test_no_store(new_client: Any) -> None:
    client = new_client(response_store_size=0)
    assert client.get(f"/v1/responses/{create(client)['id']}").status_code == 404


def test_the_store_is_bounded(new_client: Any) -> None:
    client = new_client(response_store_size=3)
    ids = [create(client)["id"] for _ in range(3)]
    assert client.get(f"/v1/responses/{ids[0]}").status_code == 200  # used: it stays
    ids.append(create(client)["id"])
    assert [client.get(f"/v1/responses/{id}").status_code for id in ids] == [200, 404, 200, 200]


def test_bytes_are_bounded() -> None:
    store = Store(1000, 10_000)
    for i in range(50):
        store.put(f"resp_{i}", "", Stored.of({"text": "x" * 900}))
        assert store.num_bytes <= 10_000
    assert len(store) == 10_000 // (len('{"text":"","metadata":{}}') + 900)
    assert store.get("resp_49", "") and store.get("resp_0", "") is None
    store.put("large", "", Stored.of({}, Pieces.of([{"content": "x" * 10_000}])))
    assert store.get("large", "") is None and store.get("resp_49", ""), "one that is too large drives no other out"
    for i in range(50):
        store.delete(f"resp_{i}", "")
    assert (len(store), store.num_bytes) == (0, 0)


def test_many_of_one_key_leave_another_its_few() -> None:
    store = Store(100, 100_000)
    store.put("mine", "me", Stored.of({}))
    for i in range(300):
        store.put(f"resp_{i}", "you", Stored.of({"text": "x" * 900}))
        assert len(store) <= 100 and store.num_bytes <= 100_000
    assert store.get("mine", "me") is not None and store.get("mine", "you") is None
    assert store.get("resp_299", "you") is not None and len(store) == 100
    for i in range(60):
        store.put(f"mine_{i}", "me", Stored.of({}))
    assert [store.get(f"mine_{i}", "me") is not None for i in (0, 59)] == [False, True], "then both have the same"
    store.put("large", "me", Stored.of({"text": "x" * 90_000}))
    assert store.get("large", "me") is None and store.get("resp_299", "you") is not None


def test_nobody_gets_what_is_another_ones(new_client: Any) -> None:
    client = new_client(api_key=("one", "two"))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    path = f"/v1/responses/{create(client, headers=one)['id']}"
    assert client.get(path, headers=one).status_code == 200
    assert client.get(path, headers={"x-api-key": "one"}).status_code == 200
    assert client.get(path).status_code == 401
    for method, hidden in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        assert client.request(method, hidden, headers=two).status_code == 404
    previous = {"input": "Hi", "previous_response_id": path.rpartition("/")[2]}
    assert client.post("/v1/responses", previous, headers=two).status_code == 400
    assert client.post("/v1/responses", previous, headers=one).status_code == 200


def test_cancelling_a_stream(serve: Any, engine: Any) -> None:
    engine.delay, engine.script = 0.01, lambda request: [[50]] * 10_000

    async def test(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1/responses"
        async with (
            httpx.AsyncClient() as other,
            httpx.AsyncClient() as http,
            http.stream("POST", base, json={"input": "Hi", "stream": True}) as stream,
        ):
            lines = stream.aiter_lines()
            events = [json.loads(line[6:]) async for line in _until_text(lines)]
            id = events[0]["response"]["id"]
            running = (await other.get(f"{base}/{id}")).json()
            assert running["id"] == id and running["status"] == "in_progress"
            cancelled = (await other.post(f"{base}/{id}/cancel")).json()
            assert cancelled["id"] == id and cancelled["status"] == "cancelled"
            last = json.loads([line async for line in lines if line.startswith("data: ")][-1][6:])["response"]
            assert last["status"] == "cancelled" and last["output"][0]["status"] == "incomplete"
            assert (await other.get(f"{base}/{id}")).json() == last
            again = await other.post(f"{base}/{id}/cancel")
            assert again.status_code == 200 and again.json() == last
        assert engine.num_open == 0

    serve(test)


async def _until_text(lines: Any) -> Any:
    async for line in lines:
        if line.startswith("data: "):
            yield line
        if line.startswith("event: response.output_text.delta"):
            await asyncio.sleep(0)
            return
