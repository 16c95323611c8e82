"""Keys: their names in the log, what each may use in a minute, and files that are read again."""

from __future__ import annotations

import asyncio
import logging
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from vserve.engine.errors import ConfigError
from vserve.server.app import create_app
from vserve.server.errors import ApiError
from vserve.server.generation import quota
from vserve.server.generation.quota import Quota
from vserve.server.http.keys import Key, Keys
from vserve.server.options.config import ServerConfig
from vserve.server.options.keys import read_key_file

HI = {"prompt": "Hi", "max_tokens": 2}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VSERVE_API_KEY", "VLLM_API_KEY", "VSERVE_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nkey-ada name=ada requests-per-minute=2\nkey-bob name=bob tokens_per_minute=20\nkey-x\n")
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(quota, "time", clock)
    return clock


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_many_keys_cost_no_more_than_one() -> None:
    """Every request is asked for one, before anything is known of who asks."""

    def seconds(count: int, presented: bytes) -> float:
        keys = Keys(
            Key(digest, "", Quota(0, 0), False) for digest in (sha256(b"%d" % n).digest() for n in range(count))
        )
        begun = time.perf_counter()
        for _ in range(20):
            assert (keys.find(presented) is None) is (presented == b"none")
        return time.perf_counter() - begun

    for presented in (b"0", b"none"):
        one = min(seconds(1, presented) for _ in range(3))
        assert min(seconds(1 << 14, presented) for _ in range(3)) < 100 * one


def test_the_file_of_keys(key_file: Path) -> None:
    ada, bob, other = read_key_file(str(key_file), "--api-key-file")
    assert (ada.key, ada.name, ada.requests_per_minute, ada.tokens_per_minute) == ("key-ada", "ada", 2, None)
    assert (bob.name, bob.requests_per_minute, bob.tokens_per_minute) == ("bob", None, 20)
    assert (other.key, other.name) == ("key-x", "keys:5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("# secret", "holds no key"),
        ("secret of-mine", "line 1, has as word 2 what is no setting"),
        ("a\nsecret rpm=3", "line 2, has as word 2 what is no setting"),
        ("secret requests-per-minute=many", "requests-per-minute=many: it must be a whole number"),
        ("secret requests-per-minute=-1", "requests-per-minute=-1: it must be a whole number"),
        ("secret name=a name=b", "as word 3 what is no setting"),
    ],
)
def test_a_file_of_keys_that_says_nothing_clear(tmp_path: Path, text: str, message: str) -> None:
    (path := tmp_path / "keys").write_text(text)
    for option in ("api_key_file", "admin_api_key_file"):
        with pytest.raises(ConfigError, match=message) as raised:
            ServerConfig(**{option: str(path)})
        assert "secret" not in str(raised.value) and f"--{option.replace('_', '-')}" in str(raised.value)


def test_keys_have_names_in_the_log(new_client: Any, key_file: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key-env")
    client = new_client(api_key_file=str(key_file), api_key=("key-option",), admin_api_key=("key-admin",))
    caplog.set_level(logging.INFO, "vserve.request")
    names = []
    for key in ("key-ada", "key-x", "key-option", "key-env", "key-admin", "wrong"):
        client.get("/v1/models", headers=bearer(key))
        record = caplog.records[-1]
        names.append(record.fields().get("key"))
        assert record.getMessage().endswith(f", key {names[-1]}") or key == "wrong"
        assert key not in record.getMessage() and key not in str(record.fields())
    assert names == ["ada", "keys:5", "api-key-1", "VLLM_API_KEY", "admin-api-key-1", None]


def test_requests_a_minute(new_client: Any, key_file: Path, clock: Any) -> None:
    client = new_client(api_key_file=str(key_file))
    assert [client.post("/v1/completions", HI, headers=bearer("key-ada")).status_code for _ in range(3)] == [
        200,
        200,
        429,
    ]
    refused = client.post("/v1/completions", HI, headers=bearer("key-ada"))
    assert refused.headers["retry-after"] == "30" and "sesame" not in refused.text
    error = refused.json()["error"]
    assert error["type"] == "rate_limit_error" and error["code"] == "key_requests_per_minute"
    assert error["message"] == "This key may use 2 requests a minute; try again in 30 s."
    assert client.post("/v1/completions", HI, headers=bearer("key-x")).status_code == 200  # has no such limit
    assert client.get("/v1/models", headers=bearer("key-ada")).status_code == 200  # asks nothing of the model
    assert 'requests_rejected_total{model_name="test",reason="key_requests"} 2.0' in client.get(
        "/metrics", headers=bearer("key-x")
    ).text.replace('engine="0",', "")
    clock.now += 29
    assert client.post("/v1/completions", HI, headers=bearer("key-ada")).status_code == 429
    clock.now += 1.5
    assert client.post("/v1/completions", HI, headers=bearer("key-ada")).status_code == 200


def test_tokens_a_minute_are_those_that_were_used(new_client: Any, key_file: Path, clock: Any) -> None:
    client = new_client(api_key_file=str(key_file))
    used, answers = 0, []
    while len(answers) < 20 and (not answers or answers[-1].status_code == 200):
        answers.append(client.post("/v1/completions", HI, headers=bearer("key-bob")))
        used += answers[-1].json().get("usage", {}).get("total_tokens", 0)
    answer = answers[-1]
    assert answer.json()["error"]["code"] == "key_tokens_per_minute"
    assert 8 < used <= 24  # a body of some 30 bytes counts as some 8 tokens until it is tokenised
    wait = float(answer.headers["retry-after-ms"]) / 1000
    clock.now += wait - 0.1
    assert client.post("/v1/completions", HI, headers=bearer("key-bob")).status_code == 429
    clock.now += 0.2
    assert client.post("/v1/completions", HI, headers=bearer("key-bob")).status_code == 200


def test_a_refused_request_costs_no_tokens(new_client: Any, key_file: Path, clock: Any) -> None:
    client = new_client(api_key_file=str(key_file))
    for _ in range(5):
        wrong = {**HI, "temperature": -1, "user": "u" * 10}
        assert client.post("/v1/completions", wrong, headers=bearer("key-bob")).status_code == 400
        long = {"prompt": [5] * 200}
        assert client.post("/v1/completions", long, headers=bearer("key-bob")).status_code == 400
    assert client.post("/v1/completions", HI, headers=bearer("key-bob")).status_code == 200


def test_one_limit_for_all_keys(new_client: Any, key_file: Path, clock: Any) -> None:
    client = new_client(
        api_key_file=str(key_file), api_key=("one", "two"), admin_api_key=("admin",), key_requests_per_minute=1
    )
    for key, most in (("one", 1), ("two", 1), ("key-ada", 2), ("key-x", 1)):
        statuses = [client.post("/v1/completions", HI, headers=bearer(key)).status_code for _ in range(3)]
        assert statuses == [200] * most + [429] * (3 - most)
    assert {client.post("/v1/completions", HI, headers=bearer("admin")).status_code for _ in range(3)} == {200}


def test_what_is_larger_than_a_minutes_share_waits_for_a_whole_one(clock: Any) -> None:
    one = quota.Quota(0, 10)
    one.check(50, lambda reason: None)
    charge = one.begin(50)
    for later in (0, 239):
        clock.now += later
        with pytest.raises(ApiError):
            one.check(1, lambda reason: None)
    charge.settle(0)
    one.check(10, lambda reason: None)


def test_open_requests_of_a_key(engine: Any, text_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("key-ada max-open-requests=2\nkey-bob\nkey-all max-open-requests=0\n")
    app = create_app(engine, ServerConfig(api_key_file=str(path), max_open_requests=5), text_model)
    engine.delay = 1000.0

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:

            async def ask(key: str, n: int, url: str = "/v1/completions", **fields: Any) -> httpx.Response:
                body = {"prompt": "Hello", "n": n, "temperature": 1} if n else {}
                return await http.post(url, json={**body, **fields}, headers=bearer(key))

            tasks = [asyncio.create_task(ask(key, n)) for key, n in (("key-ada", 2), ("key-bob", 4), ("key-all", 9))]
            while engine.num_open < 15:
                await asyncio.sleep(0.001)
            refused = await ask("key-ada", 1)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_open_requests"
            assert (
                refused.headers["retry-after"] and "--max-open-requests allows 2" in refused.json()["error"]["message"]
            )
            never = await ask("key-ada", 3)
            assert never.status_code == 400 and never.json()["error"]["param"] == "n"
            assert (await ask("key-bob", 2)).status_code == 429
            app.state.server.reloads["keys"]()
            assert (await ask("key-ada", 1)).status_code == 429, "what is open stays open"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            engine.delay = 0.0
            assert (await ask("key-ada", 2)).status_code == 200

    asyncio.run(main())


def test_keys_are_read_again(new_client: Any, key_file: Path, clock: Any) -> None:
    client = new_client(api_key_file=str(key_file), admin_api_key=("admin",))
    for _ in range(2):
        assert client.post("/v1/completions", HI, headers=bearer("key-ada")).status_code == 200
    key_file.write_text("key-ada name=ada requests-per-minute=2\nkey-new name=new\n")
    assert client.get("/v1/models", headers=bearer("key-new")).status_code == 401
    assert client.post("/reload", headers=bearer("key-ada")).status_code == 403
    assert client.post("/reload", headers=bearer("admin")).json() == {"reloaded": ["keys"]}
    assert client.get("/v1/models", headers=bearer("key-new")).status_code == 200
    assert client.get("/v1/models", headers=bearer("key-x")).status_code == 401
    # What was used stays used.
    assert client.post("/v1/completions", HI, headers=bearer("key-ada")).status_code == 429
    key_file.write_text("")
    failed = client.post("/reload", headers=bearer("admin"))
    assert failed.status_code == 500 and "holds no key" in failed.json()["error"]["message"]
    assert client.get("/v1/models", headers=bearer("key-new")).status_code == 200
    assert client.get("/v1/models").status_code == 401


def test_the_path_of_the_model_is_for_administrators(new_client: Any, text_model: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    path = str(tmp_path)
    model = replace(text_model, names=("test", path), root=path)
    client = new_client(model, api_key=("key",), admin_api_key=("admin",))
    for form in ({}, {"anthropic-version": "2023-06-01"}):
        assert path not in client.get("/v1/models", headers=bearer("key") | form).text
    shown = client.get("/v1/models", headers=bearer("key")).json()["data"]
    assert [(one["id"], one["root"]) for one in shown] == [("test", "test")]
    assert client.get("/v1/models/test", headers=bearer("key")).json()["root"] == "test"
    assert client.post("/v1/completions", {**HI, "model": path}, headers=bearer("key")).status_code == 200
    shown = client.get("/v1/models", headers=bearer("admin")).json()["data"]
    assert [(one["id"], one["root"]) for one in shown] == [("test", path), (path, path)]
    # A name of the hub is no secret; and where every key may read /server_info, it may read this.
    hub = replace(text_model, names=("org/name",), root="org/name")
    assert new_client(hub, admin_api_key=("admin",)).get("/v1/models").json()["data"][0]["root"] == "org/name"
    for options, headers in (({}, {}), ({"api_key": ("key",)}, bearer("key"))):
        assert new_client(model, **options).get("/v1/models", headers=headers).json()["data"][0]["root"] == path


ANSWERS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Hi"}]], "max_tokens": 1},
    "/invocations": {"prompt": "Hi", "max_tokens": 1},
    "/v1/engines/test/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"], "model": "test"},
    "/score": {"text_1": "Hi", "text_2": "Ho"},
    "/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/classify": {"input": "Hi"},
}


@pytest.fixture
def by_priority(engine: Any) -> None:
    engine.info = msgspec.structs.replace(engine.info, scheduling_policy="priority")


@pytest.mark.parametrize("path", ANSWERS)
def test_priority_is_for_keys_that_may_set_it(new_client: Any, key_file: Path, by_priority: None, path: str) -> None:
    options = {"api_key_file": str(key_file), "api_key": ("key-option",)}

    def refused(client: Any, priority: int, *keys: str) -> list[bool]:
        answers = [client.post(path, ANSWERS[path] | {"priority": priority}, headers=bearer(key)) for key in keys]
        for answer in answers:
            if answer.status_code == 403:
                assert "'priority'" in answer.json()["error"]["message"] and "--priority-keys" in answer.text
        return [answer.status_code == 403 for answer in answers]

    client = new_client(**options, admin_api_key=("admin",), priority_keys=("bob", "keys:5"))
    assert refused(client, -1, "key-bob", "key-x", "admin", "key-ada", "key-option") == [False] * 3 + [True] * 2
    assert refused(client, 0, "key-ada") == [False]
    assert refused(new_client(**options), 5, "key-x", "key-option") == [True, True]
    assert refused(new_client(**options, priority_keys=("*",)), 5, "key-x", "key-option") == [False, False]
    assert refused(new_client(), 5, "any") == [False], "where nobody has a key"
    assert refused(new_client(admin_api_key=("admin",)), 5, "any") == [False], "or needs none"


def test_priority_reaches_the_engine_and_follows_the_file(
    new_client: Any, key_file: Path, engine: Any, by_priority: None
) -> None:
    client = new_client(api_key_file=str(key_file), priority_keys=("bob",))
    body = HI | {"priority": -7}
    assert client.post("/v1/completions", body, headers=bearer("key-bob")).status_code == 200
    assert engine.submitted[-1].priority == -7
    key_file.write_text("key-bob name=ada\nkey-ada name=bob\n")
    assert client.post("/reload", headers=bearer("key-bob")).status_code == 200
    assert client.post("/v1/completions", body, headers=bearer("key-bob")).status_code == 403
    assert client.post("/v1/completions", body, headers=bearer("key-ada")).status_code == 200


def test_a_name_that_no_key_has_is_said_at_once(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key-env")
    for name in ("ada", "keys:5", "api-key-1", "VLLM_API_KEY", "admin-api-key-1", "*"):
        ServerConfig(
            api_key_file=str(key_file), api_key=("one",), admin_api_key=("admin",), priority_keys=("bob", name)
        )
    for options in ({"api_key_file": str(key_file)}, {}):
        with pytest.raises(ConfigError, match="--priority-keys is 'eve': no key has this name"):
            ServerConfig(**options, priority_keys=("eve",))


@pytest.mark.parametrize("path", [path for path in ANSWERS if path not in ("/score", "/rerank", "/classify")])
def test_keys_find_nothing_of_each_other_in_the_cache(new_client: Any, engine: Any, path: str) -> None:
    """What parts the chains of hashes is the key's, and the client's own salt parts them further. None makes another
    key's: salts are of one key and one client's salt alone."""
    options: Any = {"api_key": ("one", "two"), "admin_api_key": ("admin",)}
    engine.info = msgspec.structs.replace(engine.info, max_model_len=2000)

    def salts(client: Any) -> list[str | None]:
        found = []
        for key in ("one", "two", "admin"):
            for salt in (None, "s", "t", sha256(b"one").hexdigest(), f"{sha256(b'one').hexdigest()} s"):
                before = len(engine.submitted)
                client.post(path, ANSWERS[path] | ({} if salt is None else {"cache_salt": salt}), headers=bearer(key))
                (submitted,) = engine.submitted[before:]
                found.append(submitted.cache_salt)
        return found

    client = new_client(**options)
    first = salts(client)
    assert len(set(first)) == 15 and None not in first and first == salts(client), "the same later"
    assert not any(sha256(b"one").hexdigest() in str(salt) for salt in first), "nothing of a key leaves the process"
    shared = salts(new_client(**options, isolate_keys=False))
    assert shared == salts(new_client()) == shared[:5] * 3 and shared[:3] == [None, "s", "t"]
