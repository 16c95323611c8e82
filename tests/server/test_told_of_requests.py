"""What is told of a request: its times in the answer, fields that nobody knows, its model and adapter in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vserve.engine.options.config import EngineConfig
from vserve.server.observe import metrics as counting

TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    """Records of requests, as they come."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("vserve.request")
    handler.emit = records.append  # type: ignore[method-assign]
    level, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_times_are_in_the_answer_where_they_are_wanted(new_client: Any) -> None:
    client = new_client(enable_per_request_metrics=True)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for ask in (client.chat, client.complete):
        metrics = ask(max_tokens=5).json()["metrics"]
        assert metrics.keys() == TIMES | {"prompt_tokens", "cached_tokens"}
        assert metrics["prompt_tokens"] > 0 and metrics["cached_tokens"] >= 0
        assert all(metrics[name] is None or metrics[name] >= 0 for name in TIMES)
        assert metrics["generation_time_ms"] is not None
        *chunks, last = events(ask(max_tokens=5, **usage))
        assert last["metrics"].keys() == metrics.keys() and not any("metrics" in chunk for chunk in chunks)
        assert "metrics" not in ask(max_tokens=5, n=2).json()  # whose would they be?
    without = new_client()
    assert "metrics" not in without.chat(max_tokens=5).json()
    assert not any("metrics" in chunk for chunk in events(without.chat(max_tokens=5, **usage)))


def test_unknown_fields_are_counted_and_told_once(new_client: Any, told: list[logging.LogRecord]) -> None:
    client = new_client()
    for _ in range(2):
        answer = client.chat(max_tokens=2, max_new_tokens=3, topp=0.5, zz=1)
        assert answer.headers["x-vserve-ignored-params"] == "max_new_tokens, topp, zz"
    warnings = [record.getMessage() for record in told if record.levelno == logging.WARNING]
    assert [message.partition(" (told once")[0] for message in warnings] == [
        "a request has the field max_new_tokens, which changes nothing; did you mean max_tokens?",
        "a request has the field topp, which changes nothing; did you mean top_p?",
        "a request has the field zz, which changes nothing; nothing has that name",
    ]
    assert "vllm:requests_with_unknown_fields_total" in client.get("/metrics").text
    assert client.app.state.server.metrics.unknown_fields.num_requests == 2
    client.chat(max_tokens=2, **{f"field_{number}": 1 for number in range(300)})
    assert len([record for record in told if record.levelno == logging.WARNING]) == 100, "the log has an end"


def test_the_log_and_the_counters_name_the_adapter(
    new_client: Any, engine: Any, tmp_path: Path, told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MOST_ADAPTERS", 2)
    engine.config = EngineConfig(model="test", enable_lora=True)
    for name in ("sql", "pirate", "shy"):
        (tmp_path / name).mkdir()
    client = new_client(lora_modules=tuple(f"{name}={tmp_path / name}" for name in ("sql", "pirate", "shy")))
    server = client.app.state.server
    client.run(server.adapters.load_all(server.config.modules()))
    for name in ("test", "sql", "pirate", "shy", "sql"):
        assert client.chat(model=name, max_tokens=2).status_code == 200
    lines = [record.args[0] for record in told]  # type: ignore[index]
    assert [line.fields().get("adapter") for line in lines] == [None, "sql", "pirate", "shy", "sql"]
    assert {line.fields()["model"] for line in lines} == {"test"}
    assert ": test, " in str(lines[0]) and ": sql, " in str(lines[1])
    page = client.get("/metrics").text
    counts = {
        name: float(line.split()[-1]) for line in page.splitlines() for name in ("sql", "pirate", "(others)")
        if line.startswith("vllm:adapter_requests_total") and f'adapter="{name}"' in line
    }  # fmt: skip
    assert counts == {"sql": 2, "pirate": 1, "(others)": 1}
    message = client.chat(model="pirat").json()["error"]["message"]
    assert message == "The model `pirat` does not exist; this server has `test`, `sql`, `pirate`, `shy`."
