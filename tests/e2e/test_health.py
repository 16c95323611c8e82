"""Probes mean what they say, from the first second of start-up on: real processes, real signals."""

from __future__ import annotations

import os
import signal
import threading

import httpx
import pytest

PROBES = ("health", "livez", "readyz", "ping")
COMPLETION = {"model": "demo", "prompt": "go on", "temperature": 0, "ignore_eos": True}


def answers(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True


@pytest.mark.slow
def test_the_port_answers_while_the_model_loads(launch_server, reserve_port, until, is_gone):
    server = launch_server(port=reserve_port(), env={"VSERVE_FAULT": "phase:memory:hang", "VSERVE_ALLOW_FAULTS": "1"})
    try:
        until(lambda: answers(f"{server.url}/livez"))
        until(lambda: server.health()["phase"] == "memory")  # and there it stays
        assert server.health() == {"status": "loading", "phase": "memory", "progress": None}
        assert server.health("readyz")["status"] == server.health("ping")["status"] == "loading"
        assert server.health("livez") == {}
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/x")):
            response = httpx.request(method, server.url + path, json=COMPLETION if method == "POST" else None)
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "model_loading"
        pid = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        assert server.stderr[-1] == "vserve: stopped by SIGTERM while starting\n"
        assert server.process.stdout.read() == ""  # it was never announced
        until(lambda: is_gone(pid))
        assert not answers(f"{server.url}/livez")
    finally:
        server.process.kill()


def test_a_server_that_takes_requests_says_so(demo_server):
    for probe in PROBES:
        response = httpx.get(f"{demo_server.url}/{probe}")
        assert (response.status_code, response.content) == (200, b"")


@pytest.fixture(scope="module")
def watched(serve):
    with serve("--stall-timeout", "1.5", "--hang-timeout", "0") as server:
        yield server


@pytest.mark.slow
def test_row_38_sigstop_engine(watched, until):
    answer = {}
    body = COMPLETION | {"max_tokens": 400}
    expected = httpx.post(f"{watched.url}/v1/completions", json=body, timeout=240).json()["choices"][0]["text"]

    def complete():
        answer["text"] = httpx.post(f"{watched.url}/v1/completions", json=body, timeout=240).json()["choices"][0][
            "text"
        ]

    pid = watched.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=complete)
        thread.start()
        until(lambda: watched.health().get("status") == "stalled")
        assert watched.health()["seconds"] >= 1.5
        for probe in PROBES:
            assert watched.health(probe)["status"] == "stalled"
        until(lambda: any("MainThread" in line or "Current thread" in line for line in watched.stderr))
        until(lambda: any("stopped (SIGSTOP" in line for line in watched.stderr))
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: watched.health() == {})
    thread.join(240)
    assert answer["text"] == expected
    assert watched.engine_pid() == pid  # it was not restarted


@pytest.mark.slow
def test_a_pause_of_the_server_is_no_stall_of_the_engine(watched, until):
    before = sum("the stacks of all processes" in line for line in watched.stderr)
    pid = watched.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{watched.url}/livez", timeout=4)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: watched.health() == {})
    assert sum("the stacks of all processes" in line for line in watched.stderr) == before
