"""A server whose model is in two stages answers as one that has it whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

PROMPTS = ["Hello there", "What is seven and five?", "The capital of France is", "One two three"]
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": 16, "temperature": temperature, "seed": 7, "logprobs": 2}
    for prompt in PROMPTS
    for temperature in (0.0, 0.8)
]


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return {"text": choice["text"], "tokens": choice["logprobs"]["tokens"], "reason": choice["finish_reason"]}


@pytest.mark.slow
def test_stages_answer_over_http(serve: Any, demo_server: Any) -> None:
    expected = [ask(demo_server.url, body) for body in BODIES]
    with serve("-pp", "2", "--pipeline-layer-partition", "2,4") as server, ThreadPoolExecutor(len(BODIES)) as pool:
        assert list(pool.map(lambda body: ask(server.url, body), BODIES)) == expected
        settings = httpx.get(f"{server.url}/server_info").json()["settings"]
        assert settings["pipeline_parallel_size"]["value"] == 2
        assert settings["pipeline_layer_partition"]["value"] == "2,4"
        assert any("tightest" in line and ", stage " in line for line in server.stderr)
        assert any("layers of the 2 stages: 2, 4" in line for line in server.stderr)
