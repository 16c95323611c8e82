"""Stored chats: kept when told to, listed, read, relabelled, deleted, by owner, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from vserve.server.dialects.store import Store, Stored

PATH = "/v1/chat/completions"


def test_store_read_and_delete(client: Any) -> None:
    answer = client.chat(store=True, metadata={"topic": "news"}).json()
    stored = client.get(f"{PATH}/{answer['id']}").json()
    assert stored == answer | {"metadata": {"topic": "news"}}
    messages = client.get(f"{PATH}/{answer['id']}/messages").json()
    (message,) = messages["data"]
    assert (message["role"], message["content"]) == ("user", "Hi") and messages["first_id"] == message["id"]
    renewed = client.post(f"{PATH}/{answer['id']}", {"metadata": {"topic": "old"}}).json()
    assert renewed == answer | {"metadata": {"topic": "old"}} == client.get(f"{PATH}/{answer['id']}").json()
    gone = client.request("DELETE", f"{PATH}/{answer['id']}").json()
    assert gone == {"object": "chat.completion.deleted", "id": answer["id"], "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/messages"), ("POST", "")):
        body = {"json": {"metadata": {}}} if method == "POST" else {}
        missing = client.request(method, f"{PATH}/{answer['id']}{path}", **body)
        assert missing.status_code == 404 and answer["id"] in missing.json()["error"]["message"]
    assert client.get(f"{PATH}/{client.chat(metadata={'a': 'b'}).json()['id']}").status_code == 404, "not told to"


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 20, "n": 8, "temperature": 1}])
def test_a_stream_is_stored_as_what_it_says(client: Any, engine: Any, extra: dict[str, Any]) -> None:
    """Also where putting it together takes long enough for a thread."""
    if extra:
        engine.script = lambda request: [*[[50]] * 60, [2]]
    body = {"store": True, "seed": 1, **extra}
    whole = client.chat(**body).json()
    streamed = client.chat(**body, stream=True)
    assert streamed.text.endswith("[DONE]\n\n")

    async def settled() -> None:
        for task in list(client.app.state.server.tasks):
            await task

    client.run(settled())
    first, second = client.get(PATH).json()["data"]
    assert first["id"] == whole["id"] != second["id"]
    assert second["choices"] == first["choices"] and second["usage"] == first["usage"]


def test_the_list(client: Any) -> None:
    ids = [
        client.chat(store=True, model=model, metadata={"topic": topic, "n": str(i)}).json()["id"]
        for i, (model, topic) in enumerate((("test", "a"), ("alias", "b"), ("test", "b")))
    ]
    client.get(f"{PATH}/{ids[0]}")  # reading one does not move it
    client.post(f"{PATH}/{ids[0]}", {"metadata": {"topic": "a"}})  # nor does another label

    def listed(**query: Any) -> list[int]:
        return [ids.index(one["id"]) for one in client.get(PATH, params=query).json()["data"]]

    assert listed() == [0, 1, 2] and listed(order="desc") == [2, 1, 0]
    assert listed(limit=1) == [0] and listed(after=ids[0], limit=1) == [1]
    assert listed(model="test") == [0, 2] and listed(**{"metadata[topic]": "b"}) == [1, 2]
    assert listed(**{"metadata[topic]": "b", "metadata[n]": "2"}) == [2] and listed(**{"metadata[x]": "b"}) == []
    page = client.get(PATH, params={"limit": 2}).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[1], True)
    for wrong in ({"limit": 0}, {"order": "x"}, {"after": "x"}):
        assert client.get(PATH, params=wrong).status_code == 400


def test_nobody_gets_what_is_another_ones(new_client: Any) -> None:
    client = new_client(api_key=("one", "two"))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "store": True}
    id = client.post(PATH, body, headers=one).json()["id"]
    assert client.get(f"{PATH}/{id}", headers=one).status_code == 200
    assert [client.get(f"{PATH}{path}", headers=two).status_code for path in (f"/{id}", f"/{id}/messages")] == [404] * 2
    assert client.request("DELETE", f"{PATH}/{id}", headers=two).status_code == 404
    assert client.post(f"{PATH}/{id}", {"metadata": {}}, headers=two).status_code == 404
    assert client.get(PATH, headers=two).json()["data"] == [] and client.get(PATH).status_code == 401
    assert client.get(f"/v1/responses/{id}", headers=one).status_code == 404, "a chat is no response"


def test_it_is_bounded(new_client: Any) -> None:
    client = new_client(response_store_size=2)
    ids = [client.chat(store=True).json()["id"] for _ in range(3)]
    assert [client.get(f"{PATH}/{id}").status_code for id in ids] == [404, 200, 200]
    for metadata in ({"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): "" for i in range(17)}):
        for answer in (client.chat(metadata=metadata), client.post(f"{PATH}/{ids[2]}", {"metadata": metadata})):
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("metadata")


def test_one_id_twice_counts_once() -> None:
    store = Store(10, 10_000)
    for size in (900, 9000, 900):
        store.put("chatcmpl-mine", "", Stored.of({"text": "x" * size, "metadata": {"c": "d"}}))
    assert len(store) == 1 and store.num_bytes < 1000
    stored = store.get("chatcmpl-mine", "")
    renewed = store.relabel("chatcmpl-mine", "", stored, {"a": "b"})
    assert renewed == b'{"text":"%b","metadata":{"a":"b"}}' % (b"x" * 900) and store.num_bytes == len(renewed)
    assert store.get("chatcmpl-mine", "").metadata == {"a": "b"}
    store.put("chatcmpl-mine", "you", Stored.of({}))
    assert len(store) == 2
    assert store.delete("chatcmpl-mine", "") and store.delete("chatcmpl-mine", "you") and store.num_bytes == 0
