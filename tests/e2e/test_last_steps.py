"""GET /server_info?steps=N: what the engine's last steps did."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest


def last_steps(server: Any, count: int) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/server_info", params={"steps": count})
    assert answer.status_code == 200, answer.text
    steps: list[dict[str, Any]] = answer.json()["steps"]
    return steps


def test_an_answer_is_in_the_steps(demo_server: Any) -> None:
    known = {step["step"] for step in last_steps(demo_server, 1024)}
    began = time.time()
    body = {"prompt": [7] * 33, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "cache_salt": "steps"}
    usage = httpx.post(f"{demo_server.url}/v1/completions", json=body, timeout=240).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (33, 20)
    steps = [step for step in last_steps(demo_server, 1024) if step["step"] not in known]
    assert sum(step["num_tokens"] for step in steps) >= 33 + 19  # the last one of an answer is only sampled
    assert sum(step["num_decodes"] for step in steps) >= 19
    for step in steps:
        assert step["num_requests"] >= 1 and step["device_seconds"] > 0 and step["host_seconds"] > 0
        assert began <= step["time"] <= time.time()
    assert last_steps(demo_server, 2) == steps[-2:]


@pytest.mark.parametrize("steps", ["0", "-1", "1025", "1e3", "", "all", "5&steps=6", "\u0663"])
def test_other_numbers_are_refused(demo_server: Any, steps: str) -> None:
    answer = httpx.get(f"{demo_server.url}/server_info?steps={steps}")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "steps"
    assert error["message"].endswith("ask for 1 to 1024 of the last steps.")
