"""Three engines behind one address: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from vserve import LLM, SamplingParams

BODY = {"prompt": "Hello there", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def replicas(serve):
    with serve(
        "-dp", "3", "--engine-restarts", "100", "--served-model-name", "demo", "--admin-api-key", "admin"
    ) as server:
        yield server


def post(server, headers: dict[str, str] | None = None, **changes: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY | changes, headers=headers or {}, timeout=240)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def series(server, name: str) -> dict[str, float]:
    """By engine."""
    found = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(f"vllm:{name}{{"):
            found[line.partition('engine="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
    return found


def test_each_engine_answers_alike_and_counts_for_itself(replicas, demo_server):
    expected = text(post(demo_server))
    assert len(replicas.engine_pids()) == 3
    before = series(replicas, "engine_steps_total")
    assert [text(post(replicas, {"X-data-parallel-rank": str(rank)})) for rank in range(3)] == [expected] * 3
    after = series(replicas, "engine_steps_total")
    assert set(after) == {"0", "1", "2"} and all(after[rank] > before[rank] for rank in after)
    assert set(series(replicas, "num_requests_running")) == {"0", "1", "2"}
    assert set(series(replicas, "generation_tokens_total")) == {"all"}


@pytest.mark.parametrize("rank", ["3", "-1", "one", "1.0", "0x1"])
def test_a_rank_that_is_none(replicas, rank):
    response = post(replicas, {"X-data-parallel-rank": rank})
    assert response.status_code == 400 and "engines here are 0 to 2" in response.json()["error"]["message"]


def test_a_session_stays_and_others_are_spread(replicas):
    before = series(replicas, "engine_steps_total")
    for index in range(4):
        text(post(replicas, {"X-Session-ID": "me"}, prompt=f"{index} is a number, and so is this", max_tokens=3))
    moved = [rank for rank, steps in series(replicas, "engine_steps_total").items() if steps > before[rank]]
    assert len(moved) == 1
    before = series(replicas, "engine_steps_total")
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda index: text(post(replicas, prompt=f"{index} others", max_tokens=40)), range(12)))
    assert all(steps > before[rank] for rank, steps in series(replicas, "engine_steps_total").items())


@pytest.mark.slow
def test_the_page_shows_each_engine_and_looks_at_the_one_that_is_chosen(replicas, open_page, until):
    page = open_page(f"{replicas.url}/#engine")
    page.get_by_role("tab", name="Engine").click()
    rows = page.locator("#engines tbody tr")
    until(lambda: rows.count() == 3 and all("serves" in rows.nth(index).inner_text() for index in range(3)))
    page.get_by_role("button", name="Engine 2").click()
    until(lambda: rows.nth(2).get_by_role("button").get_attribute("aria-pressed") == "true")
    steps = page.locator("#split-figures")
    text(post(replicas, {"X-data-parallel-rank": "1"}, max_tokens=20))
    text(post(replicas, {"X-data-parallel-rank": "2"}, max_tokens=20))
    until(lambda: "slowest" in steps.inner_text())
    assert page.locator("#step").inner_text() != "No step yet."


@pytest.mark.parametrize("engine", ["3", "-1", "x", "9" * 30])
def test_an_engine_to_look_at_that_is_none(replicas, engine):
    assert httpx.get(f"{replicas.url}/ui/events?engine={engine}").status_code == 400


@pytest.mark.slow
def test_structured_output_on_every_engine(replicas):
    for rank in (0, 1, 2, 0):
        answer = post(
            replicas,
            {"X-data-parallel-rank": str(rank)},
            structured_outputs={"choice": ["yes", "no"]},
            ignore_eos=False,
        )
        assert text(answer) in ("yes", "no")


@pytest.mark.slow
def test_a_death_takes_only_what_had_begun(replicas, until, canary_of):
    """Of one engine's requests, those that wait go on elsewhere; other engines' go on; it comes back by itself."""
    expected = canary_of(replicas)
    pids = replicas.engine_pids()
    running = {}

    def stream(rank: int) -> None:
        body = BODY | {"stream": True, "max_tokens": 1900, "logprobs": 20}
        headers = {"X-data-parallel-rank": str(rank)}
        with httpx.stream("POST", f"{replicas.url}/v1/completions", json=body, headers=headers, timeout=240) as answer:
            running[rank] = []
            for line in answer.iter_lines():
                if line:
                    running[rank].append(line)

    streams = [threading.Thread(target=stream, args=(rank,)) for rank in range(3)]
    for thread in streams:
        thread.start()
    until(lambda: len(running) == 3 and all(len(lines) > 2 for lines in running.values()))
    victim = _engine_of_rank(replicas, pids, 1)
    os.kill(victim, signal.SIGSTOP)  # what comes now gets no token
    with ThreadPoolExecutor(6) as pool:
        at_it = {"X-data-parallel-rank": "1"}
        waiting = [pool.submit(post, replicas, at_it, prompt=f"{i} wait") for i in range(3)]
        until(lambda: httpx.get(f"{replicas.url}/load").json()["server_load"] == 6)  # with the streams
        waiting += [pool.submit(post, replicas, prompt=f"{i} anywhere") for i in range(3)]
        assert series(replicas, "engine_healthy") == {"0": 1, "1": 1, "2": 1}
        started = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        assert all(answer.result().status_code == 200 for answer in waiting), [a.result().text for a in waiting]
        assert replicas.health() == {}, "the others serve"
    for thread in streams:
        thread.join(240)
    assert time.monotonic() - started < 120
    failed = {rank: [line for line in lines if line.startswith('data: {"error":')] for rank, lines in running.items()}
    assert failed == {0: [], 1: [running[1][-2]], 2: []} and running[1][-1] == "data: [DONE]"
    until(lambda: series(replicas, "engine_healthy") == {"0": 1, "1": 1, "2": 1})
    assert victim not in replicas.engine_pids() and len(replicas.engine_pids()) == 3
    assert text(post(replicas, {"X-data-parallel-rank": "1"})) == expected
    assert any("requests without a token go on elsewhere" in line for line in replicas.stderr)
    assert any("engine 1: " in line and "starting it again" in line for line in replicas.stderr)


@pytest.fixture
def canary_of():
    return lambda server: text(post(server))


def _engine_of_rank(server, pids: list[int], rank: int) -> int:
    """Engines are started in the order of their ranks, but their pids may come in any: the log tells none. The one
    whose steps stop when its process is stopped is it."""
    for pid in pids * 5:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
        before = series(server, "engine_steps_total")
        time.sleep(0.5)
        after = series(server, "engine_steps_total")
        os.kill(pid, signal.SIGCONT)
        if [one for one in before if before[one] == after[one]] == [str(rank)]:
            return pid
    raise AssertionError("no engine")


@pytest.mark.slow
def test_offline(tiny_model):
    prompts = [f"the answer to {index} is" for index in range(8)]
    params = SamplingParams(temperature=0, max_tokens=8)
    folder = str(tiny_model("llama"))
    with LLM(folder, device="cpu", cpu_threads=2) as one, LLM(folder, device="cpu", data_parallel_size=2) as two:
        expected = [output.outputs[0].token_ids for output in one.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in two.generate(prompts, params)] == expected


@pytest.mark.slow
def test_scaled_under_load_nothing_is_lost(replicas, canary_of):
    """One engine leaves and another comes while requests are answered: each gets its whole answer, once."""
    expected, over = canary_of(replicas), threading.Event()

    def ask() -> list[tuple[int, str]]:
        found = []
        while not over.is_set():
            with httpx.stream(
                "POST", f"{replicas.url}/v1/completions", json=BODY | {"stream": True, "max_tokens": 12}, timeout=240
            ) as answer:
                events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
                assert events[-1] == "[DONE]", events[-2:]
                texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
                found.append((answer.status_code, "".join(texts)))
        return found

    def scale(size: int) -> None:
        body = {"data_parallel_size": size, "drain_timeout": 60}
        headers = {"authorization": "Bearer admin"}
        answer = httpx.post(f"{replicas.url}/scale_data_parallel", json=body, headers=headers, timeout=240)
        assert answer.status_code == 200, answer.text
        assert len(replicas.engine_pids()) == size and len(series(replicas, "engine_healthy")) == size

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask) for _ in range(6)]
        try:
            scale(2)
            scale(3)
        finally:
            over.set()
        answers = [answer for future in asked for answer in future.result()]
    assert len(answers) > 6 and set(answers) == {(200, expected)}
    assert text(post(replicas, {"X-data-parallel-rank": "2"})) == expected
