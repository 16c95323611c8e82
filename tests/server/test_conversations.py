"""/v1/conversations: items that responses go on from and add to; bounded, and each key's own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from vserve.server.api import conversations
from vserve.server.dialects.pieces import Pieces
from vserve.server.dialects.store import Store, Stored

from .test_response_store import create

ASKED = "<|im_start|>user\nMy name is Ada.<|im_end|>\n<|im_start|>assistant\nHello world!<|im_end|>\n"


def new(client: Any, *items: Any, **body: Any) -> str:
    answer = client.post("/v1/conversations", {"items": list(items), **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def texts(client: Any, id: str) -> list[str]:
    listed = client.get(f"/v1/conversations/{id}/items", params={"order": "asc", "limit": 100}).json()["data"]
    return [item["content"][0]["text"] if item["type"] == "message" else item["type"] for item in listed]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("store", [True, False])
def test_a_conversation_goes_on(thinking: Any, store: bool) -> None:
    client = thinking.client
    thinking.says("Hello world!")
    id = new(client)
    first = create(client, "My name is Ada.", conversation=id, store=store, instructions="Be brief.")
    assert first["conversation"] == {"id": id}
    streamed = client.post("/v1/responses", {
        "input": [user("Why?")], "conversation": {"id": id}, "stream": True, "store": store
    })  # fmt: skip
    assert json.loads(streamed.text.split("\n\n")[-2].partition("data: ")[2])["response"]["status"] == "completed"
    assert thinking.prompt == f"{ASKED}<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(client, id) == ["My name is Ada.", "Hello world!", "Why?", "Hello world!"]
    rendered = client.post("/v1/responses/render", {"input": "Oh", "conversation": id}).json()["prompt"]
    counted = client.post("/v1/responses/input_tokens", {"input": "Oh", "conversation": id}).json()["input_tokens"]
    assert rendered.count("Hello world!") == 2 and counted > 20 and len(texts(client, id)) == 4, "these add nothing"
    if store:
        made_of = client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
        assert [item["content"][0]["text"] for item in made_of] == ["My name is Ada."]


def test_items_are_added_read_and_taken_out(thinking: Any) -> None:
    client = thinking.client
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    id = new(client, user("a"), metadata={"topic": "x"})
    path = f"/v1/conversations/{id}"
    assert client.get(path).json() == client.get(path).json() | {"object": "conversation", "metadata": {"topic": "x"}}
    added = client.post(f"{path}/items", {"items": [call, result, user("b")]}).json()
    ids = [item["id"] for item in added["data"]]
    assert (added["first_id"], added["last_id"], added["has_more"]) == (ids[0], ids[2], False)
    assert texts(client, id) == ["a", "function_call", "function_call_output", "b"]
    assert client.get(f"{path}/items/{ids[1]}").json() == {**result, "id": ids[1], "status": "completed"}
    latest = client.get(f"{path}/items", params={"limit": 1}).json()
    assert latest["data"][0]["id"] == ids[2] and latest["has_more"]
    for taken in ids[:2]:
        assert client.request("DELETE", f"{path}/items/{taken}").json()["id"] == id
    assert texts(client, id) == ["a", "b"]
    create(client, "c", conversation=id)
    said = [part.partition("<|im_end|>")[0] for part in thinking.prompt.split("<|im_start|>user\n")[1:]]
    assert said == ["a", "b", "c"] and "sun" not in thinking.prompt, "what was taken out is not said"
    for missing in (f"{path}/items/{ids[0]}", f"{path}/items/msg_other"):
        assert [client.request(method, missing).status_code for method in ("GET", "DELETE")] == [404, 404]
    labels = client.post(path, {"metadata": {"topic": "y"}}).json()
    assert labels["metadata"] == client.get(path).json()["metadata"] == {"topic": "y"} and len(texts(client, id)) > 3
    assert client.request("DELETE", path).json() == {"id": id, "object": "conversation.deleted", "deleted": True}
    for method, gone in (
        ("GET", path), ("DELETE", path), ("POST", path), ("GET", f"{path}/items"), ("POST", f"{path}/items"),
        ("GET", f"{path}/items/{ids[2]}"), ("DELETE", f"{path}/items/{ids[2]}"),
    ):  # fmt: skip
        body = {"json": {"metadata": {}, "items": []}} if method == "POST" else {}
        assert client.request(method, gone, **body).status_code == 404, (method, gone)
    answer = client.post("/v1/responses", {"input": "x", "conversation": id})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "conversation"


def test_what_is_no_conversation(client: Any) -> None:
    id = new(client)
    for path, body, param in (
        ("/v1/conversations", {"items": "x"}, "items"),
        ("/v1/conversations", {"items": [{"role": "x", "content": "y"}]}, "items[0].role"),
        ("/v1/conversations", {"metadata": {"a": "b" * 513}}, "metadata"),
        (f"/v1/conversations/{id}/items", {}, "items"),
        (f"/v1/conversations/{id}/items", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ("/v1/responses", {"input": "x", "conversation": id, "previous_response_id": "resp_1"}, "conversation"),
    ):
        answer = client.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert texts(client, id) == []


def test_a_conversation_is_bounded(new_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = new_client(response_store_bytes=4000, max_body_size=2000)
    id = new(client, user("x" * 1000))
    path = f"/v1/conversations/{id}/items"
    assert client.post(path, {"items": [user("y" * 300)]}).status_code == 200
    full = client.post(path, {"items": [user("z" * 900)]})
    assert full.status_code == 400 and "--response-store-bytes allows 4000" in full.text
    assert [len(text) for text in texts(client, id)] == [1000, 300], "as it was"
    monkeypatch.setattr(conversations, "MAX_ITEMS", 3)
    many = client.post(path, {"items": [user("")] * 2})
    assert many.status_code == 400 and "would have 4 items; at most 3" in many.text
    none = new_client(response_store_size=0).post("/v1/conversations", {})
    assert none.status_code == 400 and "--response-store-size is 0" in none.text


def test_a_conversation_larger_than_a_body_is_refused_or_cut(new_client: Any) -> None:
    client = new_client(max_body_size=2000)
    id = new(client, user("x" * 1500))
    assert client.post(f"/v1/conversations/{id}/items", {"items": [user("y" * 1500)]}).status_code == 200
    body = {"input": "z", "conversation": id}
    answer = client.post("/v1/responses", body)
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("conversation", "context_length_exceeded"), error


def test_each_key_has_its_own(new_client: Any) -> None:
    client = new_client(api_key=("a", "b"))
    headers = [{"headers": {"authorization": f"Bearer {key}"}} for key in "ab"]
    id = client.post("/v1/conversations", {"items": [user("secret")]}, **headers[0]).json()["id"]
    path = f"/v1/conversations/{id}"
    assert client.get(path, **headers[0]).status_code == 200
    for answer in (
        client.get(path, **headers[1]), client.get(f"{path}/items", **headers[1]),
        client.request("DELETE", path, **headers[1]), client.post(f"{path}/items", {"items": []}, **headers[1]),
        client.post("/v1/responses", {"input": "x", "conversation": id}, **headers[1]),
    ):  # fmt: skip
        assert answer.status_code == 404 and "secret" not in answer.text
    assert client.get(f"/v1/responses/{id}", **headers[0]).status_code == 404, "it is no response"


def test_two_who_add_at_once_lose_nothing() -> None:
    store = Store(9, 1 << 20)
    store.put("c", "o", Stored.of({}, Pieces.of([{"a": 1}])))
    seen = store.get("c", "o")
    assert seen is not None and store.renew("c", "o", seen, Stored.of({}, Pieces.of([{"a": 2}])))
    assert not store.renew("c", "o", seen, Stored.of({})), "another was quicker: look again"
    kept = store.get("c", "o")
    assert kept is not None and list(kept.messages.entries()) == [{"a": 2}] and len(store) == 1


def test_the_sdk_drives_it(serve: Any) -> None:
    def talk(port: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            made = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "Hi"}])
            assert made.id.startswith("conv_") and made.metadata == {"a": "b"}
            answer = client.responses.create(model="test", input="You?", conversation=made.id)
            assert answer.conversation is not None and answer.conversation.id == made.id
            items = list(client.conversations.items.list(made.id, order="asc", limit=2))
            assert [type(item).__name__ for item in items] == ["Message"] * 3, "page after page"
            more = client.conversations.items.create(made.id, items=[{"role": "user", "content": "Oh"}])
            (oh,) = more.data
            assert oh.id is not None and client.conversations.items.retrieve(oh.id, conversation_id=made.id) == oh
            assert client.conversations.items.delete(oh.id, conversation_id=made.id).id == made.id
            assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
            assert client.conversations.retrieve(made.id).metadata == {"c": "d"}
            assert client.conversations.delete(made.id).deleted
            with pytest.raises(openai.NotFoundError):
                client.responses.create(model="test", input="You?", conversation=made.id)

    serve(lambda port: asyncio.to_thread(talk, port))
