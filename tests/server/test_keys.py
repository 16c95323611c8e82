"""Keys: their names in the log, what each may use in a minute, and files that are read again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.errors import ConfigError
from vserve.server.errors import ApiError
from vserve.server.generation import quota
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
