"""Attacks by connections, rows 23 and 29 to 31 and 43: slow, silent, gone, deaf, or too many of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import threading
import time

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("unharmed")

JSON = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LONG = {"model": "demo", "prompt": "go on", "max_tokens": 1900, "ignore_eos": True}


# ---- row 23: slowloris ----


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\n", *[b"x-%d: a\r\n" % i for i in range(60)]],
        [b"G", b"E", b"T", b" ", *[b"/"] * 60],
        [JSON + b"content-length: 1000\r\n\r\n", *[b"{"] * 60],
        [JSON + b"transfer-encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 60],
    ],
    ids=["headers", "line", "body", "chunks"],
)
@pytest.mark.slow
def test_row_23_slow_requests_are_closed_with_408(url, attacks, pieces):
    with attacks.connect(url) as sock:
        for piece in pieces:
            try:
                sock.sendall(piece)
            except OSError:
                break
            time.sleep(0.25)
            if sock_has_data(sock):
                break
        else:
            pytest.fail("it has read them all, which took 15 s")
        ((status, error),) = attacks.answers(attacks.read_all(sock))
    assert (status, error["code"]) == (408, "slow_request")


def sock_has_data(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        sock.settimeout(120)


def test_row_23_who_says_nothing_is_closed_without_a_word(url, attacks):
    with attacks.connect(url) as sock:
        assert attacks.read_all(sock) == b""


def test_row_23_a_head_begun_after_an_answer_is_timed_too(url, attacks):
    with attacks.connect(url) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert attacks.read_answer(sock)[0] == 200
        sock.sendall(b"GET /health HT")
        assert [status for status, _ in attacks.answers(attacks.read_all(sock))] == [408]


@pytest.mark.slow
def test_row_23_a_stream_outlives_the_limits_for_requests(url):
    """Only what the client sends is timed: an answer may take as long as it takes."""
    body = {**LONG, "max_tokens": 600, "stream": True, "n": 2, "temperature": 1}
    started = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240) as answer:
        text = answer.read().decode()
    assert text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"length"') == 2
    if time.monotonic() - started < 2:
        pytest.skip("this machine is too fast to tell")


@pytest.mark.slow
def test_row_23_thousands_of_idle_connections_do_not_stop_a_canary(serve, api_servers, attacks):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    idle = []
    try:
        with serve(*api_servers, "--header-timeout", "30") as server:
            invariants = attacks.Invariants(server)
            for i in range(3000):
                sock = attacks.connect(server.url)
                if i % 2:
                    sock.sendall(b"GET /he")
                idle.append(sock)
            invariants.check()
            for sock in idle:
                sock.close()
            invariants.check()
    finally:
        for sock in idle:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_row_23_the_longest_idle_connection_makes_room(serve, api_servers, attacks):
    with serve(*api_servers, "--max-connections", "20", "--header-timeout", "60") as server:
        invariants = attacks.Invariants(server)
        idle = [attacks.connect(server.url) for _ in range(60)]
        invariants.check()
        assert attacks.read_all(idle[0]) == b""  # closed long before its time
        assert invariants.metric("http_refused_connections_total", "evicted_connection") >= 40
        for sock in idle:
            sock.close()


@pytest.mark.slow
def test_row_43_a_server_out_of_file_descriptors_lives_on(serve, api_servers, attacks):
    # Connections: more than there are files.
    with serve(*api_servers, "--max-connections", "5000", "--header-timeout", "60") as server:
        invariants = attacks.Invariants(server)
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, limits[1]))
        idle = []
        for _ in range(200):
            try:
                idle.append(attacks.connect(server.url))
            except OSError:
                break
        time.sleep(1)
        assert server.process.poll() is None
        for sock in idle:
            sock.close()
        deadline = time.monotonic() + 120
        while True:
            try:
                invariants.check()
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.2)


# ---- row 29: clients that leave ----


def leave_politely(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [leave_politely, reset, half_close])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["at once", "midway"])
def test_row_29_whoever_leaves_is_aborted_and_counted(url, attacks, before, leave, stream, when):
    aborted = before.metric("vllm:request_success_total", '"abort"')
    generated = before.metric("vllm:generation_tokens_total")
    sock = attacks.connect(url)
    # With log-probabilities it takes so long that it is never over before anybody has seen it run.
    sock.sendall(attacks.post(json.dumps({**LONG, "stream": stream, "logprobs": 20}).encode()))
    if when == "midway":
        if stream:
            data = b""
            while b"data: " not in data:
                data += sock.recv(1 << 14)
        else:
            wait_for(lambda: before.metric("vllm:num_requests_running") > 0)
    leave(sock)
    wait_for(lambda: before.metric("vllm:num_requests_running") == before.metric("vllm:num_requests_waiting") == 0)
    sock.close()
    if when == "midway":  # else it may have left before it was let in
        wait_for(lambda: before.metric("vllm:request_success_total", '"abort"') == aborted + 1)
    assert before.metric("vllm:generation_tokens_total") - generated < 1900


def wait_for(condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_row_29_whoever_leaves_with_another_request_behind_is_aborted_too(url, attacks, before):
    aborted = before.metric("vllm:request_success_total", '"abort"')
    sock = attacks.connect(url)
    body = json.dumps({**LONG, "stream": True, "n": 2}).encode()
    sock.sendall(attacks.post(body) + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in sock.recv(1 << 10)
    reset(sock)
    wait_for(lambda: before.metric("vllm:request_success_total", '"abort"') >= aborted + 1)


def test_row_29_leaving_in_the_middle_of_a_body(url, attacks, before):
    for _ in range(20):
        with attacks.connect(url) as sock:
            sock.sendall(attacks.post(json.dumps(LONG).encode())[:-10])
    before.check()


# ---- row 30: clients that stop reading ----


@pytest.mark.slow
def test_row_30_a_deaf_client_is_dropped_and_others_go_on(url, attacks, before):
    stalled = before.metric("http_refused_connections_total", "stalled_reader")
    body = json.dumps({**LONG, "stream": True, "n": 16, "logprobs": 20}).encode()  # megabytes of events
    other_body = {**LONG, "max_tokens": 600, "stream": True}
    deaf = attacks.connect(url, receive_buffer=4096)
    deaf.sendall(attacks.post(body))
    with httpx.stream("POST", f"{url}/v1/completions", json=other_body, timeout=240) as other:
        assert other.read().decode().endswith("data: [DONE]\n\n")
    wait_for(lambda: before.metric("http_refused_connections_total", "stalled_reader") == stalled + 1)
    wait_for(lambda: before.metric("vllm:requests_timed_out_total", '"write"') >= 1)
    deaf.close()


# ---- row 31: too many at once ----


@pytest.mark.slow
def test_row_31_a_burst_is_admitted_or_told_when_to_come_again(serve, api_servers, attacks):
    with serve(*api_servers, "--max-num-queued-reqs", "8", "--max-num-seqs", "4") as server:
        invariants = attacks.Invariants(server)
        limit = 4 + 8
        os.kill(server.engine_pid(), signal.SIGSTOP)  # so that no place is given back before all have asked
        outcomes: list[httpx.Response] = []
        body = {**LONG, "max_tokens": 60}
        go = threading.Barrier(60)

        def ask() -> None:
            with httpx.Client(timeout=240) as client:
                go.wait()
                outcomes.append(client.post(f"{server.url}/v1/completions", json=body))

        threads = [threading.Thread(target=ask) for _ in range(60)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: len(outcomes) == 60 - limit)
        finally:
            os.kill(server.engine_pid(), signal.SIGCONT)
        for thread in threads:
            thread.join(150)
        accepted = [answer for answer in outcomes if answer.status_code == 200]
        refused = [answer for answer in outcomes if answer.status_code == 429]
        assert len(accepted) + len(refused) == 60 and len(accepted) == limit
        for answer in refused:
            error = attacks.is_error(answer, 429)
            assert error["code"] == "queue_full" and "--max-num-queued-reqs" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1 and int(answer.headers["retry-after-ms"]) >= 1
        assert invariants.metric("vllm:requests_rejected_total", "queued_requests") == len(refused)
        invariants.check()


@pytest.mark.slow
def test_row_31_thousands_of_requests_at_once(serve, api_servers, attacks):
    """As many connections as one test may open; those let in finish, and the canary sings."""
    with serve(*api_servers, "--max-num-seqs", "8", "--max-num-queued-reqs", "64", "--header-timeout", "60") as server:
        invariants = attacks.Invariants(server)
        request = attacks.post(json.dumps({**LONG, "max_tokens": 8}).encode(), "connection: close")
        sockets = [attacks.connect(server.url) for _ in range(2000)]
        for sock in sockets:
            sock.sendall(request)
        statuses = []
        for sock in sockets:
            sock.settimeout(120)
            statuses += [status for status, _ in attacks.answers(attacks.read_all(sock))]
            sock.close()
        assert len(statuses) == 2000 and set(statuses) == {200, 429} and statuses.count(200) >= 72
        invariants.check()
