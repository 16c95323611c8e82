"""Row 34: time limits of requests on a real engine; what is late is aborted, and its blocks come back."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

LONG = {"model": "demo", "prompt": "go on", "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(serve):
    with serve(
        "--max-num-seqs", "1", "--max-num-queued-reqs", "9", "--queue-timeout", "1", "--request-timeout", "5"
    ) as server:
        yield server


@pytest.mark.slow
def test_row_34_late_requests_end_and_give_back_what_they_held(server, attacks):
    invariants = attacks.Invariants(server)
    url = f"{server.url}/v1/completions"
    answers: dict[str, httpx.Response] = {}
    running = threading.Event()

    def run_long() -> None:
        # slow enough for any machine: each position brings its log-probabilities
        with httpx.stream("POST", url, json={**LONG, "stream": True, "logprobs": 20}, timeout=240) as answer:
            chunks = []
            for chunk in answer.iter_bytes():
                running.set()
                chunks.append(chunk)
            answers["running"] = httpx.Response(answer.status_code, content=b"".join(chunks))

    def wait_in_queue(name: str, body: dict[str, object]) -> None:
        answers[name] = httpx.post(url, json=body, timeout=240)

    first = threading.Thread(target=run_long)
    first.start()
    assert running.wait(240)
    queued = [
        threading.Thread(target=wait_in_queue, args=(name, body))
        for name, body in {
            "whole": LONG, "streamed": {**LONG, "stream": True},
            "many": {**LONG, "prompt": ["a", "b"], "n": 2, "temperature": 1},
        }.items()
    ]  # fmt: skip
    for thread in queued:
        thread.start()
    for thread in (*queued, first):
        thread.join(240)
    for name in ("whole", "streamed", "many"):
        error = attacks.is_error(answers[name], 503)
        assert error["code"] == "queue_timeout" and "--queue-timeout" in error["message"]
        assert int(answers[name].headers["retry-after"]) >= 1
    *_, last, done = answers["running"].text.strip().split("\n\n")
    assert done == "data: [DONE]"
    if '"finish_reason":"length"' not in answers["running"].text:  # the machine was not too fast
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert invariants.metric("vllm:requests_timed_out_total", '"request"') == 1
    assert invariants.metric("vllm:requests_timed_out_total", '"queue"') == 3
    invariants.check(server_errors=3)


@pytest.mark.slow
def test_row_34_the_queue_timeout_leaves_alone_what_has_begun(serve, attacks):
    """A prompt whose first token takes longer than the limit is not late: it runs."""
    with serve("--queue-timeout", "1", "--max-num-batched-tokens", "1", "--max-num-seqs", "1") as server:
        body = {"model": "demo", "prompt": [[5 + i % 50 for i in range(2000)]], "max_tokens": 1}
        started = time.monotonic()
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1
        assert time.monotonic() - started > 1, "a step a token takes longer, or this tests nothing"
        attacks.Invariants(server).check()
