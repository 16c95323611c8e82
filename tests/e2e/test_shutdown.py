"""Row 37: SIGTERM and SIGINT end the server in order, a second one at once. Real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest

BODY = {"model": "demo", "prompt": "go on", "temperature": 0, "ignore_eos": True}


class Stream:
    """A streamed completion, read by a thread of its own."""

    def __init__(self, server, **options):
        self.events: list[str] = []
        self.status = 0
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server.url, BODY | {"stream": True} | options))
        self._thread.start()

    def _read(self, url, body):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])
                    self.begun.set()
        self.begun.set()

    @classmethod
    def several(cls, number, server, **options):
        """Of which each has begun."""
        streams = [cls(server, **options) for _ in range(number)]
        assert all(stream.begun.wait(120) for stream in streams)
        return streams

    def join(self):
        self._thread.join(240)
        assert not self._thread.is_alive()
        return self.events


def open_requests(server) -> int:
    return httpx.get(f"{server.url}/load").json()["server_load"]


def port_is_free(server) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_row_37_what_runs_is_finished_and_nothing_new_begins(start_server, until, is_gone, number):
    server = start_server("--shutdown-timeout", "600", "--stall-timeout", "300")
    pid = server.engine_pid()
    streams = Stream.several(2, server, max_tokens=1900)
    os.kill(pid, signal.SIGSTOP)  # so that nothing is over before it has been looked at
    server.process.send_signal(number)
    until(lambda: server.health().get("status") == "draining")
    assert server.health("readyz") == {"status": "draining"}
    assert server.health("livez") == {}
    refused = httpx.post(f"{server.url}/v1/completions", json=BODY)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "server_shutting_down"
    os.kill(pid, signal.SIGCONT)
    for stream in streams:
        events = stream.join()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0
    assert is_gone(pid) and port_is_free(server)


@pytest.mark.slow
def test_a_hang_up_ends_no_engine_and_under_nohup_no_server(launch_server, until, is_gone):
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from vserve.server.cli.main import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    server = launch_server(code=code)
    for line in server.process.stdout:
        if line.startswith("http://"):
            server.url = line.split()[0].replace("localhost", "127.0.0.1")
            break
    for pid in (server.process.pid, server.engine_pid()):
        os.kill(pid, signal.SIGHUP)
    assert httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 3}, timeout=240).status_code == 200
    server.process.terminate()
    assert server.wait() == 0


@pytest.mark.slow
def test_row_37_what_does_not_finish_in_time_ends_with_an_error(start_server, until, is_gone):
    server = start_server("--shutdown-timeout", "0.5")
    pid = server.engine_pid()
    whole = {}

    def complete():
        whole["answer"] = httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 2000}, timeout=240)

    thread = threading.Thread(target=complete)
    thread.start()
    streams = Stream.several(7, server, max_tokens=2000, logprobs=20)  # some seconds of work
    until(lambda: open_requests(server) == 8)
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        events = stream.join()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "server_shutting_down"
    thread.join(240)
    assert whole["answer"].status_code == 503
    assert server.wait() == 0
    assert any("cut off" in line for line in server.stderr)
    assert is_gone(pid) and port_is_free(server)


@pytest.mark.slow
def test_row_37_no_time_at_all(start_server, is_gone):
    server = start_server("--shutdown-timeout", "0")
    pid = server.engine_pid()
    (stream,) = Stream.several(1, server, max_tokens=2000, logprobs=20)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert json.loads(stream.join()[-2])["error"]["code"] == "server_shutting_down"
    assert is_gone(pid)


@pytest.mark.slow
def test_row_37_a_second_signal_ends_at_once(start_server, until, is_gone):
    server = start_server("--shutdown-timeout", "600")
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)  # so that it would take for ever

    def complete():
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=240)

    thread = threading.Thread(target=complete)
    thread.start()
    until(lambda: open_requests(server) == 1)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.health().get("status") == "draining")
    time.sleep(1)  # nearer together they would count as one
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 128 + signal.SIGINT
    assert server.stderr[-1] == "vserve: stopped at once by a second SIGINT\n"
    thread.join(240)
    until(lambda: is_gone(pid))


@pytest.mark.slow
def test_row_37_an_engine_that_does_not_answer_cannot_hold_up_the_end(start_server, until, is_gone):
    server = start_server()
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    until(lambda: is_gone(pid))


@pytest.mark.slow
def test_row_37_a_unix_socket_is_removed(start_server, launch_server, until, tmp_path):
    path = tmp_path / "vserve.sock"
    server = launch_server("--uds", str(path))
    until(path.exists)
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://x") as client:

        def answers() -> bool:
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:  # between bind, which makes the path, and listen
                return False

        until(answers)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not path.exists()


STUCK = """
import threading
from vserve.server.cli import main
from vserve.server.text.tokenizer import Tokenizer

encode = Tokenizer.encode
Tokenizer.encode = lambda self, text, special: threading.Event().wait(100) or encode(self, text, special)
raise SystemExit(main.main())
"""


@pytest.mark.slow
def test_row_37_a_thread_that_tokenises_cannot_hold_up_the_end(start_server, is_gone, attacks):
    """It took as long as the text, whatever --shutdown-timeout said."""
    server = start_server("--shutdown-timeout", "0.2", code=STUCK)
    pid = server.engine_pid()
    body = json.dumps(BODY | {"prompt": "go " * 2000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    asking = [attacks.connect(server.url) for _ in range(6)]
    for sock in asking:
        sock.sendall(head % len(body) + body)
    time.sleep(1)  # they are tokenised, or wait for it
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert time.monotonic() - begun < 20  # not 100
    for sock in asking:
        status, _, answer = attacks.read_answer(sock)
        assert status == 503 and json.loads(answer)["error"]["code"] == "server_shutting_down"
        sock.close()
    assert "ended in order" in server.stderr[-1]  # what was logged last was written
    assert is_gone(pid)
