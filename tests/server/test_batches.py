"""Files and batches: uploaded, answered, cancelled, forgotten; by owner, within bounds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from vserve.server.batches import asking
from vserve.server.batches.files import Files
from vserve.server.errors import ApiError
from vserve.server.http.form import MOST_PARTS, check_form, read_form
from vserve.server.router.app import _MADE, _is_routed
from vserve.server.router.asked import read
from vserve.server.wire.batch_lines import Line

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PART = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n'


def line(name: str, url: str = CHAT, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"messages": HI, **body}})


def upload(client: Any, text: str | bytes, **options: Any) -> Any:
    content = text.encode() if isinstance(text, str) else text
    fields = {"purpose": "batch", **options.pop("fields", {})}
    return client.request("POST", "/v1/files", files={"file": ("in.jsonl", content)}, data=fields, **options)


def begin(client: Any, id: str, endpoint: str = CHAT, **options: Any) -> Any:
    return client.post(
        "/v1/batches", {"input_file_id": id, "endpoint": endpoint, "completion_window": "24h"}, **options
    )


def ended(client: Any, id: str, **options: Any) -> Any:
    """The batch, once it has ended."""

    async def settled() -> None:
        await asyncio.gather(*client.app.state.server.tasks, return_exceptions=True)
        await asyncio.sleep(0)

    client.run(settled())
    return client.get(f"/v1/batches/{id}", **options).json()


def answers(client: Any, id: str, **options: Any) -> dict[str, Any]:
    text = client.get(f"/v1/files/{id}/content", **options).text
    return {answer["custom_id"]: answer for answer in map(json.loads, text.splitlines())}


def test_the_sdk_drives_a_batch(serve: Any) -> None:
    async def test(port: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            text = "\n".join([line("one"), "", line("two", n=2), line("other", model="nobody's")])
            file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
            assert (file.filename, file.bytes, file.purpose, file.status) == (
                "in.jsonl", len(text), "batch", "processed",
            )  # fmt: skip
            assert [one.id async for one in client.files.list()] == [file.id]
            assert (await client.files.content(file.id)).text == text
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
            )
            assert batch.status == "validating" and batch.metadata == {"a": "b"}
            while batch.status not in ("completed", "failed"):
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
            counts = batch.request_counts
            assert counts is not None and (counts.total, counts.completed, counts.failed) == (3, 2, 1)
            assert batch.output_file_id is not None and batch.error_file_id is not None and batch.errors is None
            lines = (await client.files.content(batch.output_file_id)).text.splitlines()
            found = {one["custom_id"]: one["response"] for one in map(json.loads, lines)}
            assert {name: len(one["body"]["choices"]) for name, one in found.items()} == {"one": 1, "two": 2}
            assert found["one"]["status_code"] == 200 and found["one"]["request_id"] in found["one"]["body"]["id"]
            assert found["one"]["body"]["choices"][0]["message"]["content"] == "Hello world!"
            (refused,) = (await client.files.content(batch.error_file_id)).text.splitlines()
            assert json.loads(refused)["response"]["status_code"] == 404
            assert [one.id async for one in client.batches.list()] == [batch.id]
            with pytest.raises(openai.BadRequestError, match="has ended"):
                await client.batches.cancel(batch.id)
            assert (await client.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError, match=r"There is no file `file-\w+`"):
                await client.files.retrieve(file.id)
            with pytest.raises(openai.NotFoundError, match="There is no batch `nobody`"):
                await client.batches.retrieve("nobody")

    serve(test)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("\n \n", "empty_file", "has no requests"),
        ("{", "invalid_request", "line 1 is no JSON"),
        (line("a") + "\n" + line("b", "/v1/completions"), "mismatched_url", "line 2 has the url /v1/completions"),
        (line("a") + "\n\n" + line("a"), "duplicate_custom_id", "line 3 has the custom_id of an earlier line"),
        (line("a", stream=True), "invalid_request", "has 'stream': leave it out"),
        ("\n".join(map(line, "abcd")), "too_many_requests", "more than 3 requests (--max-batch-requests)"),
    ],
)
def test_a_file_that_is_no_batch(new_client: Any, engine: Any, text: str, code: str, words: str) -> None:
    client = new_client(max_batch_requests=3)
    batch = begin(client, upload(client, text).json()["id"]).json()
    batch = ended(client, batch["id"])
    (error,) = batch["errors"]["data"]
    assert batch["status"] == "failed" and error["code"] == code and words in error["message"]
    assert batch["output_file_id"] is None and not engine.submitted


def test_a_key_sees_its_own_alone_and_is_charged(new_client: Any, engine: Any) -> None:
    client = new_client(api_key=("one", "two"))
    one, two = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("one", "two"))
    file = upload(client, line("a"), **one).json()["id"]
    batch = begin(client, file, **one).json()["id"]
    found = ended(client, batch, **one)
    assert found["status"] == "completed", "it asks with its owner's key"
    output = found["output_file_id"]
    assert answers(client, output, **one)["a"]["response"]["status_code"] == 200
    assert [entry["id"] for entry in client.get("/v1/files", **one).json()["data"]] == [output, file]
    assert [entry["id"] for entry in client.get("/v1/files?purpose=batch", **one).json()["data"]] == [file]
    for path in (f"/v1/files/{file}", f"/v1/files/{output}/content", f"/v1/batches/{batch}"):
        assert client.get(path, **two).status_code == 404
    assert begin(client, file, **two).status_code == 404
    assert client.post(f"/v1/batches/{batch}/cancel", **two).status_code == 404
    assert client.request("DELETE", f"/v1/files/{file}", **two).status_code == 404
    assert client.get("/v1/files", **two).json()["data"] == client.get("/v1/batches", **two).json()["data"] == []
    direct = client.post(CHAT, {"messages": HI}, **one)
    assert direct.status_code == 200
    assert engine.submitted[0].tenant == engine.submitted[1].tenant and engine.submitted[0].cache_salt is not None
    assert begin(client, output, **one).json()["error"]["message"].startswith(f"The file `{output}` has answers")


def test_a_batch_is_cancelled(new_client: Any, engine: Any) -> None:
    """What is in work is ended, what was answered stays, and its file is nobody's to delete until then."""
    client = new_client(batch_concurrency=2)
    engine.delay = 0.02
    file = upload(client, "\n".join(line(str(i)) for i in range(50))).json()["id"]
    id = begin(client, file).json()["id"]
    while (batch := client.get(f"/v1/batches/{id}").json())["request_counts"]["completed"] < 2:
        assert engine.num_open <= 2
    assert batch["status"] == "in_progress"
    busy = client.request("DELETE", f"/v1/files/{file}")
    assert busy.status_code == 409 and busy.json()["error"]["code"] == "file_in_use"
    assert client.post(f"/v1/batches/{id}/cancel").json()["status"] == "cancelling"
    batch = ended(client, id)
    assert batch["status"] == "cancelled" and batch["cancelled_at"] is not None
    done = batch["request_counts"]["completed"]
    assert 2 <= done < 50 and len(answers(client, batch["output_file_id"])) == done
    assert engine.num_open == 0 and client.app.state.server.admission.num_requests == 0
    assert client.post(f"/v1/batches/{id}/cancel").json()["status"] == "cancelled"
    assert client.request("DELETE", f"/v1/files/{file}").json() == {"id": file, "object": "file", "deleted": True}
    again = begin(client, upload(client, line("a")).json()["id"]).json()["id"]
    client.post(f"/v1/batches/{again}/cancel")  # before it has looked at its file
    assert ended(client, again)["status"] in ("cancelled", "completed")


def test_bounds(new_client: Any) -> None:
    client = new_client(file_store_bytes=4000, file_store_size=3, max_file_size=3000, max_body_size=500, max_batches=1)
    large = upload(client, "x" * 4000)
    assert large.status_code == 413 and "--max-file-size" in large.json()["error"]["message"]
    assert client.post(CHAT, {"messages": HI, "user": "x" * 600}).status_code == 413, "what other paths may bring stays"
    ids = [upload(client, "x" * 1500).json()["id"] for _ in range(2)]
    full = upload(client, "x" * 1500)
    assert full.status_code == 400 and full.json()["error"]["code"] == "file_store_full"
    assert "4000 bytes (--file-store-bytes)" in full.json()["error"]["message"]
    ids.append(upload(client, "x").json()["id"])
    assert "3 (--file-store-size)" in upload(client, "x").json()["error"]["message"]
    assert client.request("DELETE", f"/v1/files/{ids.pop(0)}").status_code == 200
    short = upload(client, line("a"), fields={"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"})
    assert short.json()["expires_at"] == short.json()["created_at"] + 60
    engine_delay = client.app.state.server.client
    engine_delay.delay = 0.2
    first = begin(client, short.json()["id"]).json()["id"]
    busy = begin(client, short.json()["id"])
    assert busy.status_code == 429 and "--max-batches" in busy.json()["error"]["message"]
    engine_delay.delay = 0
    assert ended(client, first)["error_file_id"] is None
    off = upload(new_client(file_store_bytes=0), "x")
    assert off.status_code == 400 and off.json()["error"]["code"] == "files_off"


def test_answers_that_find_no_room_end_the_batch(new_client: Any) -> None:
    text = "\n".join(line(str(i)) for i in range(20))
    client = new_client(file_store_bytes=len(text) + 3000, batch_concurrency=1)
    batch = ended(client, begin(client, upload(client, text).json()["id"]).json()["id"])
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "file_store_full"
    assert 0 < len(answers(client, batch["output_file_id"])) == batch["request_counts"]["completed"] < 20


def refusal(code: str, **headers: str) -> httpx.Response:
    return httpx.Response(503, json={"error": {"code": code}}, headers={"retry-after": "0", **headers})


@pytest.mark.parametrize(
    ("said", "status", "num_asked"),
    [
        ([refusal("engine_dead")], 200, 2),
        ([refusal("engine_dead")] * 2, 503, 2),  # it may be what ends engines
        ([refusal("queue_timeout")] * 5, 200, 6),
        ([refusal("queue_timeout")] * 50, 503, 20),
        ([refusal("adapter_unavailable", **{"x-should-retry": "false"})], 503, 1),
        ([httpx.Response(429, headers={"retry-after": "0"})] * 50, 200, 51),
        ([httpx.Response(400, json={})], 400, 1),
    ],
)
def test_what_may_pass_is_asked_again(said: list[httpx.Response], status: int, num_asked: int) -> None:
    left, asked = list(said), []

    def answered(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return left.pop(0) if left else httpx.Response(200, json={})

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answered), base_url="http://x") as http:
            response = await asking.ask(http, lambda: Line("a", CHAT, b"{}"), lambda: False)
        assert not isinstance(response, str) and response.status_code == status and len(asked) == num_asked

    asyncio.run(main())


def test_a_batch_waits_for_an_engine_that_starts_again(client: Any, engine: Any, monkeypatch: Any) -> None:
    """Its lines are not answered 503, one after the other, while there is none."""
    monkeypatch.setattr(asking, "PAUSE", 0.01)
    id = begin(client, upload(client, "\n".join(line(str(i)) for i in range(9))).json()["id"]).json()["id"]
    engine.ready, engine.down = False, "killed"

    async def again() -> None:
        await asyncio.sleep(0.1)
        assert not engine.submitted
        engine.ready, engine.down = True, None

    client.run(again())
    assert ended(client, id)["request_counts"] == {"total": 9, "completed": 9, "failed": 0}


def test_one_key_s_batches_leave_room_for_others() -> None:
    """What batches hold nobody can take away: of eight parts one is for others."""

    async def main() -> None:
        files = Files(100, 800, lifetime=1000)
        held = [files.add(f"in {i}", "greedy", "", "batch", b"x" * 200) for i in range(3)]
        for file in held:
            files.hold(file)
        output = files.add("out", "greedy", "", "batch_output", bytearray())
        files.hold(output)
        files.append(output, b"y" * 100)
        with pytest.raises(ApiError, match=r"of 800 .--file-store-bytes. those of one key may have 700"):
            files.append(output, b"y")
        last = files.add("in 3", "greedy", "", "batch", b"x" * 50)
        with pytest.raises(ApiError, match="running batches would have 750 bytes"):
            files.hold(last)
        assert last.num_users == 0
        files.add("mine", "other", "", "batch", b"x" * 100)
        assert files.of("other") and not any(file.id == "in 3" for file in files.of("greedy")), "idle ones make room"
        output.num_users -= 1
        files.hold(held[0])  # it counts once

    asyncio.run(main())


def test_who_holds_most_makes_room() -> None:
    async def main() -> None:
        files = Files(4, 100, lifetime=1000)
        for i in range(3):
            files.add(f"greedy {i}", "greedy", "", "batch", b"x" * 30)
        files.add("mine", "other", "", "batch", b"x" * 25)
        assert [file.id for file in files.of("greedy")] == ["greedy 1", "greedy 2"] and files.num_bytes == 85
        files.get("greedy 1", "greedy").num_users = 1
        with pytest.raises(ApiError, match="Delete some"):
            files.add("more", "greedy", "", "batch", b"x" * 30)
        files.add("little", "third", "", "batch", b"x" * 20)
        assert [file.id for file in files.of("greedy")] == ["greedy 1"], "what a batch reads stays"
        files.get("mine", "other").expires_at = 0
        with pytest.raises(ApiError, match="There is no file `mine`"):
            files.get("mine", "other")
        assert files.num_bytes == 50

    asyncio.run(main())


@pytest.mark.parametrize(
    ("content", "media", "status"),
    [
        (b"{}", "application/json", 415),
        (b"x", "multipart/form-data", 415),
        (b"x", "multipart/form-data; boundary=" + "b" * 71, 400),
        (b"x", "multipart/form-data; boundary=b", 400),
        (b"--b\r\n\r\nx\r\n--b--", "multipart/form-data; boundary=b", 400),
        (PART % b"file" + b"x\r\n--b--", "multipart/form-data; boundary=b", 400),
        (PART % b"purpose" + b"batch\r\n--b", "multipart/form-data; boundary=b", 400),
    ],
)  # fmt: skip
def test_forms_that_bring_no_file(client: Any, content: bytes, media: str, status: int) -> None:
    answer = client.request("POST", "/v1/files", content=content, headers={"content-type": media})
    assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_form_is_read_byte_for_byte() -> None:
    boundary = check_form('Multipart/Form-Data; charset=utf-8; boundary="a b"')
    content = b"\r\n--a\r\n-- b\r\n\r\n\x00\xff\r\n"
    head = 'Content-Disposition: form-data; name="file"; filename="sp\u00e4t.jsonl"\r\nContent-Type: x/y'.encode()
    body = b"--a b\r\n" + head + b"\r\n\r\n" + content + b"\r\n--a b--\r\n"
    assert read_form(body, boundary)["file"].content == content
    one = b'--a b\r\nContent-Disposition: form-data; name="%d"\r\n\r\nx\r\n'
    for count, words in ((MOST_PARTS + 1, "too many parts"), (0, "")):
        many = b"".join(one % i for i in range(count)) + b"--a b--\r\n"
        if words:
            with pytest.raises(ApiError, match=words):
                read_form(many, boundary)
        else:
            assert read_form(many, boundary) == {}


def test_uploads_of_other_kinds_are_refused(client: Any) -> None:
    assert "'purpose' 'fine-tune' (files here" in upload(client, "x", fields={"purpose": "fine-tune"}).text
    wrong = begin(client, upload(client, line("a")).json()["id"], "/v1/images")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "endpoint"


def test_a_router_finds_whose_file_it_is(client: Any) -> None:
    """Ids begin with the tag of the server that has made them; lists, which one server knows, are not passed on."""
    tag = {"headers": {"x-server-tag": "0123abcd"}}
    made = upload(client, line("a"), **tag)
    found = _MADE.match(made.content)
    assert (
        found is not None and found[1].decode() == made.json()["id"] and made.json()["id"].startswith("file-0123abcd")
    )
    body = json.dumps({"input_file_id": made.json()["id"], "endpoint": CHAT, "completion_window": "24h"})
    assert read(body.encode()).ids == (made.json()["id"],)
    batch = begin(client, made.json()["id"], **tag)
    assert batch.json()["id"].startswith("batch_0123abcd") and _MADE.match(batch.content) is not None
    assert ended(client, batch.json()["id"])["output_file_id"].startswith("file-0123abcd")
    for path in ("/v1/files", "/v1/batches"):
        assert _is_routed(path, "POST") and not _is_routed(path, "GET") and _is_routed(f"{path}/x", "GET")
