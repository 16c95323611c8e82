"""Three API processes on one port, before one engine: what one of them knows, all of them go by."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

BODY = {"prompt": "Hello there", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
KEY = {"authorization": "Bearer me"}


@pytest.fixture(scope="module")
def server(serve, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("me name=me\nfew name=few requests-per-minute=5\nonce name=once tokens-per-minute=1\n")
    with serve(
        "--api-server-count", "3", "--api-key-file", str(keys), "--admin-api-key", "admin", "--max-num-seqs", "4",
        "--max-num-queued-reqs", "6", "--engine-restarts", "20", "--served-model-name", "demo",
    ) as started:  # fmt: skip
        yield started


def ask(server: Any, method: str = "POST", path: str = "/v1/completions", body: Any = BODY, **options: Any) -> Any:
    """On a connection of its own: any of the processes may take it."""
    headers = KEY | options.pop("headers", {})
    content = {"json": body} if method == "POST" else {}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=240, **content, **options)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def who(server: Any) -> Counter[str]:
    """Which processes have said in the log that they answered completions."""
    return Counter(re.findall(r'"process":"(api[-\d]*)".*POST /v1/completions 200', "".join(server.stderr)))


def num_begun(server: Any) -> int:
    """How many processes beside the first have come to take requests so far, those that ended since among them."""
    return sum("takes requests after" in line for line in server.stderr)


def total(server: Any, name: str) -> float:
    page = ask(server, "GET", "/metrics").text
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)))


def test_all_of_them_answer_and_the_metrics_are_sums(server, until) -> None:
    tokens, requests = total(server, "vllm:generation_tokens_total"), 0
    expected = text(ask(server))
    with ThreadPoolExecutor(6) as pool:
        while len(who(server)) < 3:
            answers = list(pool.map(lambda _: ask(server), range(6)))
            assert {text(answer) for answer in answers} == {expected}
            requests += 6
            assert requests < 600
    until(lambda: total(server, "vllm:generation_tokens_total") == tokens + 8 * (requests + 1))
    seen = {total(server, "vllm:generation_tokens_total") for _ in range(12)}
    assert seen == {tokens + 8 * (requests + 1)}, "whoever is asked"
    assert {total(server, "vllm:engine_healthy") for _ in range(6)} == {1.0}
    answers = f'http_requests_total{{handler="/v1/completions",method="POST",status="2xx"}} {requests + 1:.1f}'
    assert answers in ask(server, "GET", "/metrics").text


def test_the_limit_of_the_queue_holds_for_all_of_them(server) -> None:
    """4 run and 6 wait: of 40 at once, that many are let in, and not three times as many. The engine is stopped until
    the others have been told: it makes no room."""
    pid, told = server.engine_pid(), 0
    with ThreadPoolExecutor(40) as pool:
        os.kill(pid, signal.SIGSTOP)
        try:
            asking = [pool.submit(ask, server) for _ in range(40)]
            deadline = time.monotonic() + 6  # at eight it is replaced
            while told < 30 and time.monotonic() < deadline:
                told = sum(one.done() and one.result().status_code == 429 for one in asking)
                time.sleep(0.01)
        finally:
            os.kill(pid, signal.SIGCONT)
        statuses = Counter(one.result().status_code for one in asking)
    assert set(statuses) == {200, 429} and 10 <= statuses[200] <= (10 if told == 30 else 20), statuses


def test_what_a_key_may_use_is_one_share(server) -> None:
    few = {"authorization": "Bearer few"}
    statuses = [ask(server, headers=few, body=BODY | {"max_tokens": 1}).status_code for _ in range(15)]
    assert statuses[:5] == [200] * 5 and set(statuses[5:]) <= {200, 429} and statuses.count(200) <= 7, statuses


def test_row_49_no_path_leads_to_what_processes_ask_each_other(server, attacks) -> None:
    """Raw, as no client library sends it, and often enough that each of the processes takes some of them."""
    bodies = {"engines": b'{"size":2,"drain_timeout":1}', "reload": b"", "metrics": b"", "adapters": b"[]"}
    ways = ("/v1/responses/../../own/", "/v1/responses/x/../../../own/", "/v1/responses/%2e%2e/%2E%2E/own/",
            "/v1/responses/..%2f..%2fown/", "/v1/responses/%252e%252e/%252e%252e/own/", "/v1/responses/..%5c..%5cown/",
            "/v1/chat/completions/x/../../../own/", "//own/", "/own/")  # fmt: skip
    engines = server.engine_pids()

    def sent(path: str, key: str | None) -> tuple[int, Any]:
        body = bodies[path.rpartition("/")[2]]
        head = [] if key is None else [f"authorization: Bearer {key}"]
        ((status, error),) = attacks.exchange(server.url, attacks.post(body, "connection: close", *head, path=path))
        return status, error

    for key in (None, "me", "admin"):
        for way in ways:
            expected = 400 if "." in way or "2e" in way else 401 if key is None else 404
            paths = [way + name for name in bodies] * (3 if key == "me" else 1)
            assert {sent(path, key)[0] for path in paths} == {expected}, (way, key)
    assert server.engine_pids() == engines


def test_row_50_a_stray_client_of_their_sockets_gets_nothing(server, until) -> None:
    paths = set(re.findall(r"(/\S+/api-\d+\.sock)$", Path("/proc/net/unix").read_text(), re.MULTILINE))
    asked = 0
    for path in paths:
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://api") as client:
            for name in ("/own/metrics", "/own/adapters", "/v1/models", "/health"):
                for headers in ({}, {"authorization": "Bearer admin"}, {"x-vserve-secret": "secret"}):
                    assert client.get(name, headers=headers).status_code == 403
                    asked += 1
    assert asked >= 36, "three processes"


def test_what_is_stored_is_found_by_all(server) -> None:
    made = ask(server, path="/v1/responses", body={"input": "Hi", "max_output_tokens": 4}).json()["id"]
    stored = {"messages": [{"role": "user", "content": "Hi"}], "store": True, "max_tokens": 4}
    names = ("/v1/chat/completions", "/invocations") * 4
    chats = {ask(server, path=name, body=stored).json()["id"] for name in names}
    few = {"authorization": "Bearer few"}
    for _ in range(6):
        assert ask(server, "GET", f"/v1/responses/{made}", headers=few).status_code == 404
        assert ask(server, "GET", "/v1/chat/completions", headers=few).json()["data"] == []
        assert ask(server, "GET", f"/v1/responses/{made}").json()["id"] == made
        found = ask(server, "GET", "/v1/chat/completions").json()["data"]
        assert {chat["id"] for chat in found} == chats and len(chats) == len(names)
    assert ask(server, path="/v1/responses", headers=few, body={"input": "And?", "previous_response_id": made}
               ).status_code in (400, 429)  # fmt: skip
    later = {"input": "And?", "previous_response_id": made, "max_output_tokens": 4, "stream": True}
    for _ in range(4):
        answer = ask(server, path="/v1/responses", body=later)
        assert answer.status_code == 200 and re.search("event: response.(completed|incomplete)", answer.text)


def test_a_request_is_cancelled_by_whoever_is_told_to(server) -> None:
    for index in range(4):
        lines, begun = [], threading.Event()

        def stream(name: str, lines: list[str] = lines, begun: threading.Event = begun) -> None:
            body, headers = BODY | {"stream": True, "max_tokens": 1500}, KEY | {"x-request-id": name}
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=240
            ) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        thread = threading.Thread(target=stream, args=(f"mine-{index}",))
        thread.start()
        assert begun.wait(60)
        admin = {"authorization": "Bearer admin"}
        cancelled = ask(server, path=f"/v1/requests/mine-{index}/cancel", headers=admin)
        assert cancelled.json()["cancelled"] == 1, cancelled.text
        thread.join(60)
        assert '"stop_reason":"abort"' in "".join(lines) and len(lines) < 1500
    assert ask(server, path="/v1/requests/nobody/cancel", headers=admin).status_code == 404


def test_prefixes_are_each_keys_own(server) -> None:
    """Whichever process asks: the same key finds what it has asked, another one nothing."""
    body = {"prompt": list(range(5, 105)), "max_tokens": 1}

    def cached(key: str) -> int:
        answer = ask(server, body=body, headers={"authorization": f"Bearer {key}"})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("me") == 0
    assert {cached("me") for _ in range(4)} == {96}
    assert cached("admin") == 0
    assert {cached("admin") for _ in range(4)} == {96}


@pytest.mark.slow
def test_grammars_of_one_are_no_others(server) -> None:
    body = {"prompt": "Yes or no?", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}
    with ThreadPoolExecutor(4) as pool:
        assert {text(answer) for answer in pool.map(lambda _: ask(server, body=body), range(12))} <= {"yes", "no"}


@pytest.mark.slow
def test_scaled_through_any_of_them(server) -> None:
    expected = text(ask(server))
    for size in (2, 1):
        answer = ask(server, path="/scale_data_parallel", body={"data_parallel_size": size, "drain_timeout": 30},
                     headers={"authorization": "Bearer admin"})  # fmt: skip
        assert answer.status_code == 200, answer.text
        assert total(server, "vllm:engine_healthy") == size == len(server.engine_pids())
        for rank in range(size):
            for _ in range(4):
                assert text(ask(server, headers={"X-data-parallel-rank": str(rank)})) == expected
        with ThreadPoolExecutor(6) as pool:
            assert {text(answer) for answer in pool.map(lambda _: ask(server), range(6))} == {expected}


def test_one_that_dies_takes_its_own_connections_and_comes_back(server, until) -> None:
    expected, before = text(ask(server)), total(server, "vllm:generation_tokens_total")
    pids = server.guests()
    assert len(pids) == 2
    until(lambda: num_begun(server) >= 2, 60)
    begun = num_begun(server)
    once = {"authorization": "Bearer once"}
    assert ask(server, headers=once).status_code == 200  # which it has to make up for in ten minutes
    over, ended = threading.Event(), Counter[str]()

    def stream() -> None:
        while not over.is_set():
            lines = []
            try:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, headers=KEY,
                                  timeout=240) as answer:  # fmt: skip
                    lines = [line for line in answer.iter_lines() if line]
            except httpx.TransportError:
                ended["broken"] += 1
                continue
            texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
            assert lines[-1] == "data: [DONE]" and "".join(texts) == expected, lines[-3:]
            ended["whole"] += 1

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(stream) for _ in range(4)]
        try:
            time.sleep(1)
            os.kill(pids[0], signal.SIGKILL)
            until(lambda: len(server.guests()) == 2 and pids[0] not in server.guests())
            time.sleep(1)
        finally:
            over.set()
        for future in asking:
            future.result()
    assert ended["whole"] > 4 and ended["broken"] <= 8, ended
    assert any("was killed by signal 9; starting it again (1 of 20)" in line for line in server.stderr)
    until(lambda: num_begun(server) == begun + 1, 60)  # the new one
    assert {text(ask(server)) for _ in range(6)} == {expected}
    until(lambda: total(server, "vllm:num_requests_running") == 0, 30)
    assert total(server, "vllm:generation_tokens_total") > before, "what was counted stays counted"
    assert {ask(server, headers=once).status_code for _ in range(24)} == {429}, "the new process knows of it"


@pytest.mark.slow
def test_one_that_hangs_is_replaced(server, until, slowness) -> None:
    """Whom it has accepted nobody else can answer: its end is what they hear of it. The others go on meanwhile."""
    expected, pids, begun = text(ask(server)), server.guests(), num_begun(server)
    with ThreadPoolExecutor(24) as pool:
        os.kill(pids[0], signal.SIGSTOP)
        stopped = time.monotonic()
        asking = [pool.submit(ask, server, body=BODY) for _ in range(24)]
        until(lambda: pids[0] not in server.guests(), 60)
        assert time.monotonic() - stopped < 8 + 6 * slowness  # eight of silence, and what a busy machine adds
        answers, broken = [], 0
        for future in asking:
            try:
                answers.append(future.result())
            except httpx.TransportError:
                broken += 1
    assert {text(answer) for answer in answers if answer.status_code == 200} == {expected}
    assert {answer.status_code for answer in answers} <= {200, 429} and broken < 24, broken
    assert any(re.search(r"API process \d has been silent for \d+ s and is killed", line) for line in server.stderr)
    until(lambda: len(server.guests()) == 2)
    until(lambda: num_begun(server) > begun, 60)
    assert {text(ask(server)) for _ in range(6)} == {expected}
    until(lambda: total(server, "vllm:num_requests_running") == 0, 30)


@pytest.mark.slow
def test_where_the_first_hangs_the_server_ends(serve, until, gone_pids) -> None:
    """It alone starts engines, ends the server, and keeps what there is one of: who has started it starts another."""
    with serve("--api-server-count", "2", "--stall-timeout", "9") as server:
        pids = [*server.guests(), *server.engine_pids()]
        time.sleep(10)  # nobody ends it while it is well
        assert server.process.poll() is None
        os.kill(server.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert server.wait(60) == -signal.SIGKILL
        assert 8 < time.monotonic() - stopped < 20
        until(lambda: gone_pids(pids), 10)
    assert re.search(r"the first API process has been silent for (9|10) s: the server ends", "".join(server.stderr))


@pytest.mark.slow
def test_an_engine_that_dies_comes_back_for_all_of_them(server, until) -> None:
    expected, pid = text(ask(server)), server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.engine_pids() not in ([], [pid]))
    until(lambda: all(ask(server, "GET", "/health").status_code == 200 for _ in range(12)))
    assert {text(ask(server)) for _ in range(12)} == {expected}


@pytest.mark.slow
def test_they_end_together_when_each_has_finished(server, until, gone_pids) -> None:
    """Some of what runs is each one's: nothing is cut off, and nobody new is let in."""
    pids = [*server.guests(), server.engine_pid()]
    begun = []

    def stream() -> list[str]:
        body = BODY | {"stream": True, "max_tokens": 200}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=KEY, timeout=240) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            first = next(lines)
            begun.append(first)
            return [first, *(line for line in lines if line)]

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(stream) for _ in range(8)]
        until(lambda: len(begun) == 8 or any(future.done() and future.exception() for future in running), 60)
        server.process.terminate()
        ended = [future.result() for future in running]
    assert all(lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2] for lines in ended)
    assert server.wait(60) == 0
    until(lambda: gone_pids(pids), 10)
    assert not [line for line in server.stderr if "Traceback" in line]


@pytest.fixture
def gone_pids():
    def gone(pids: list[int]) -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    return gone
