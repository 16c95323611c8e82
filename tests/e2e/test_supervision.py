"""Rows 38 to 42 and 46: the engine dies, hangs, runs out of memory or fails at one request. Real processes, real
signals; what no signal can cause is injected (engine/start/faults.py)."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest

BODY = {"model": "demo", "prompt": "Hello there", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1900}


def faults(*items: str) -> dict[str, str]:
    return {"VSERVE_FAULT": ",".join(items), "VSERVE_ALLOW_FAULTS": "1"}


def post(server, body=BODY) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)


def text(server) -> str:
    response = post(server)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def error(response: httpx.Response) -> dict[str, str]:
    return response.json()["error"]


@pytest.fixture(scope="module")
def canary(demo_server) -> str:
    """What the demo model says to BODY."""
    return text(demo_server)


class Background:
    """A whole answer and a stream that run while something happens to their engine."""

    def __init__(self, server) -> None:
        self.begun = threading.Event()
        self._server = server
        self._threads = [threading.Thread(target=self._whole), threading.Thread(target=self._streamed)]
        for thread in self._threads:
            thread.start()
        assert self.begun.wait(120)

    def _whole(self) -> None:
        self.whole = post(self._server, LONG)

    def _streamed(self) -> None:
        url, self.events = f"{self._server.url}/v1/completions", []
        with httpx.stream("POST", url, json=LONG | {"stream": True}, timeout=240) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.begun.set()

    def join(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def supervised(serve):
    with serve("--engine-restarts", "100") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_row_38_sigkill_engine(supervised, until, is_gone, canary, attacks, number):
    assert text(supervised) == canary
    pid = supervised.engine_pid()
    running = Background(supervised)
    os.kill(pid, number)
    running.join(240)
    assert running.whole.status_code == 503 and int(running.whole.headers["retry-after"]) >= 1
    assert f"killed by signal {number.value}" in error(running.whole)["message"]
    assert f"killed by signal {number.value}" in json.loads(running.events[-2])["error"]["message"]
    assert running.events[-1] == "[DONE]"
    until(lambda: supervised.health() == {})
    assert text(supervised) == canary
    assert is_gone(pid) and supervised.engine_pid() != pid
    assert any("starting it again" in line for line in supervised.stderr)
    attacks.is_at_rest(supervised)


@pytest.mark.slow
def test_while_it_restarts_it_says_so(start_server, until, canary):
    # the second engine, too, dies at its 30th step; the first request therefore has to be short
    server = start_server("--engine-restarts", "100", env=faults("step:30:kill"))
    assert text(server) == canary
    assert post(server, LONG).status_code == 503
    health = server.health()
    if health:  # else the machine was so busy that the next engine is there already
        assert health["status"] == "restarting" and "signal 9" in health["error"]
        assert server.health("livez") == {}
        refused = post(server)
        assert refused.status_code == 200 or int(refused.headers["retry-after"]) >= 1
    until(lambda: server.health() == {})
    assert text(server) == canary
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_ends_the_server(start_server, until, is_gone):
    server = start_server("--engine-restarts", "2", env=faults("step:5:exit"))
    pids = []
    for _ in range(3):
        until(lambda: server.health() == {})
        pids.append(server.engine_pid())
        response = post(server)
        assert response.status_code == 503 and "exited with code 3" in error(response)["message"]
    assert server.wait() == 1
    assert server.stderr[-1].startswith("vserve: the engine died: the engine process exited with code 3")
    assert "3 deaths in 10 minutes" in server.stderr[-1]
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("phase:memory:oom", "out of memory while measuring a step and taking the cache: the machine has "),
        ("phase:weights:kill", "the engine process was killed by signal 9 while "),
    ],
)
def test_row_40_out_of_memory_at_the_start_ends_in_one_line(launch_server, fault, line):
    server = launch_server(env=faults(fault))
    assert server.wait() == 1
    last = server.stderr[-1].rstrip()
    assert last.startswith(f"vserve: {line}") and "; what helps, in this order: " in last
    assert last.endswith("serve a smaller model") and not any("Traceback" in told for told in server.stderr)


@pytest.mark.slow
def test_an_engine_that_cannot_start_again_ends_the_server(start_server, tmp_path, tiny_model):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    server = start_server(str(folder), "--engine-restarts", "2")
    (folder / "model.safetensors").unlink()
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.wait() == 1
    assert "safetensors" in server.stderr[-1] and server.stderr[-1].startswith("vserve: the engine died: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "finding"), [("step:30:hang", "has run no step"), ("schedule:30:block", "has been silent")]
)
def test_a_hanging_engine_is_replaced_after_its_stacks_were_shown(serve, until, is_gone, canary, fault, finding):
    with serve("--stall-timeout", "1", "--hang-timeout", "3", env=faults(fault)) as server:
        assert text(server) == canary
        pid = server.engine_pid()
        response = post(server, LONG)
        assert response.status_code == 503 and finding in error(response)["message"]
        until(lambda: server.health() == {})
        assert is_gone(pid) and server.engine_pid() != pid
        assert text(server) == canary
        stacks = "".join(server.stderr)
        assert "faults.py" in stacks  # where the engine hangs
        assert "watchdog.py" in stacks  # the API process, too


@pytest.mark.slow
def test_row_38_an_engine_that_stays_stopped_is_replaced(supervised, until, is_gone, canary, slowness):
    """Long before it would count as hanging. A server that is suspended as a whole is not touched."""
    pids, before = (supervised.process.pid, supervised.engine_pid()), len(supervised.stderr)
    for stopped in (pids[:1], pids):  # as Ctrl-Z does, which the engine does not hear of; and all of it
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(9)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert text(supervised) == canary and supervised.engine_pid() == pids[1]
    assert not [line for line in supervised.stderr[before:] if "starting it again" in line]
    os.kill(pids[1], signal.SIGSTOP)
    stopped_at = time.monotonic()
    response = post(supervised, LONG)
    assert response.status_code == 503 and time.monotonic() - stopped_at < 8 + 6 * slowness
    cause = "the engine process was stopped by a signal (SIGSTOP) for 8 s"
    assert cause in error(response)["message"]
    until(lambda: supervised.health() == {})
    assert is_gone(pids[1]) and text(supervised) == canary
    assert sum(cause in line and "starting it again" in line for line in supervised.stderr) == 1


@pytest.mark.slow
def test_row_40_out_of_memory_at_a_step(serve, canary, attacks):
    with serve(env=faults("step:5:oom", "sample:30:oom")) as server:
        pid = server.engine_pid()
        response = post(server)
        assert response.status_code == 500 and "OutOfMemoryError" in error(response)["message"]
        assert text(server) == canary
        assert post(server, BODY | {"max_tokens": 50}).status_code == 500
        assert text(server) == canary
        assert server.engine_pid() == pid
        attacks.is_at_rest(server)


@pytest.mark.slow
def test_row_40_a_lost_device_is_a_new_engine(serve, until, canary, attacks):
    with serve(env=faults("step:20:lost")) as server:
        pid = server.engine_pid()
        assert text(server) == canary
        response = post(server, BODY | {"max_tokens": 50})
        assert response.status_code in (500, 503)
        until(lambda: server.engine_pids() not in ([pid], []) and server.health() == {})
        assert text(server) == canary
        attacks.is_at_rest(server)


@pytest.mark.slow
def test_rows_41_and_42_only_the_request_that_fails_fails(serve, canary, attacks):
    # requests: 1 fine, 2 refused by the scheduler, 3 NaN, 4 the sampler, 5 the detokenizer
    items = ("add:2:error", "step:15:nan", "sample:20:error", "detokenize:25:error")
    with serve(env=faults(*items)) as server:
        pid = server.engine_pid()
        statuses, messages = [], []
        for _ in range(8):
            response = post(server)
            statuses.append(response.status_code)
            messages.append("" if response.status_code == 200 else error(response)["message"])
            if response.status_code == 200:
                assert response.json()["choices"][0]["text"] == canary
        assert statuses.count(500) == 4 and statuses[0] == statuses[-1] == 200, messages
        assert any("injected at add 2" in message for message in messages)
        assert any("NaN" in message for message in messages)
        assert any("injected at sample 20" in message for message in messages)
        assert any("Internal error" in message for message in messages)
        assert server.engine_pid() == pid
        attacks.is_at_rest(server)


@pytest.mark.slow
def test_row_41_a_scheduler_that_fails_is_a_new_engine(serve, until, canary, attacks):
    with serve(env=faults("schedule:20:error")) as server:
        assert text(server) == canary
        pid = server.engine_pid()
        assert post(server, LONG).status_code == 503
        until(lambda: server.engine_pids() not in ([pid], []) and server.health() == {})
        assert text(server) == canary
        attacks.is_at_rest(server)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["phase:device:hang", "phase:warm-up:block"])
def test_row_46_kill_9_during_start_up(launch_server, until, is_gone, fault):
    server = launch_server(env=faults(fault))
    until(lambda: server.engine_pids() and any(f"starting: {fault.split(':')[1]}" in line for line in server.stderr))
    pid = server.engine_pid()
    server.process.kill()
    until(lambda: is_gone(pid))


@pytest.mark.slow
@pytest.mark.true_start  # it is killed while it imports
def test_row_46_the_next_start_works(launch_server, start_server, until, canary, attacks):
    server = launch_server()
    until(server.engine_pids)
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    assert server.wait() == 1
    assert "killed by signal 9" in server.stderr[-1]
    server = start_server()
    assert text(server) == canary
    attacks.is_at_rest(server)


@pytest.mark.slow
def test_no_engine_outlives_its_server_even_in_a_step(start_server, until, is_gone):
    server = start_server(env=faults("schedule:2:block"))
    pid = server.engine_pid()

    def complete():
        with pytest.raises(httpx.TransportError):
            post(server)

    thread = threading.Thread(target=complete)
    thread.start()
    until(lambda: "num_requests_running" in httpx.get(f"{server.url}/metrics").text)
    server.process.kill()
    until(lambda: is_gone(pid))
    thread.join(240)


def test_faults_are_refused_unless_they_are_allowed(launch_server):
    server = launch_server(env={"VSERVE_FAULT": "step:1:kill"})
    assert server.wait() == 2
    assert "VSERVE_ALLOW_FAULTS=1" in server.stderr[-1]
    server = launch_server(env=faults("step:x:kill"))
    assert server.wait() == 2
    assert "step:x:kill" in server.stderr[-1]
