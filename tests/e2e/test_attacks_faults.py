"""Faults around the server, rows 37, 38, 41, 43, 44 and 48: killed helpers, clocks that jump, files that lie."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

HELLO = {"model": "demo", "prompt": "Hello there", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHOICE = {**HELLO, "structured_outputs": {"choice": ["red green blue", "one two three"]}}


def post(server: Any, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=240)


def children(pid: int) -> dict[int, bytes]:
    """The processes under one, and theirs, with what they were started as."""
    found: dict[int, bytes] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # they come and go
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes()
            found |= children(int(child))
    return found


def files_of(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has been closed
                found.append(os.readlink(file))
    return found


def compiler_of(server: Any) -> int:
    """Starts it, too."""
    assert post(server, CHOICE).status_code == 200
    # It forks, and the forks have its name: of the server's own.
    (pid,) = (pid for pid, command in server.children().items() if b"grammar.worker" in command)
    return pid


# ---- rows 37 and 38: helpers ----


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rows_37_and_38_no_process_outlives_its_server(start_server, until, is_gone, number):
    """Nor a grammar that is being compiled at that moment, in a process of the compiler's own."""
    server = start_server("--shutdown-timeout", "1")
    compiler_of(server)
    bomb = "root ::= " + " ".join(f'("{i}")?' for i in range(12_000))  # which takes all the time that it is given
    slow = {**HELLO, "structured_outputs": {"grammar": bomb}}
    thread = threading.Thread(target=ask_in_vain, args=(server, slow))
    thread.start()
    until(lambda: len(children(server.process.pid)) >= 3)  # the engine, the compiler, and its child at work
    pids = children(server.process.pid)
    server.process.send_signal(number)
    assert server.wait() == (0 if number is signal.SIGTERM else -number)
    until(lambda: all(is_gone(pid) for pid in pids))
    thread.join(240)


def ask_in_vain(server: Any, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.TransportError):
        post(server, body)


@pytest.fixture(scope="module")
def helped(serve):
    """A server whose grammar compiler runs."""
    with serve("--served-model-name", "demo") as server:
        compiler_of(server)
        yield server


@pytest.mark.slow
def test_row_38_a_killed_grammar_compiler_is_another_one(helped, attacks, is_gone):
    expected = post(helped, CHOICE).json()["choices"][0]["text"]
    for number in range(3):
        pid = compiler_of(helped)
        os.kill(pid, signal.SIGKILL)
        fresh = {**CHOICE, "structured_outputs": {"choice": ["red green blue", "one two three", str(number)]}}
        answer = post(helped, fresh)  # nothing that is known already: somebody has to compile it
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected
        assert is_gone(pid)
    attacks.Invariants(helped).check()


# ---- row 41: an exception at one request ----


@pytest.mark.slow
def test_row_41_a_grammar_that_fails_ends_only_its_own_request(serve, attacks):
    with serve(env={"VSERVE_FAULT": "grammar:30:error,grammar:36:error", "VSERVE_ALLOW_FAULTS": "1"}) as server:
        compiler_of(server)
        invariants = attacks.Invariants(server)
        neighbour: dict[str, httpx.Response] = {}
        body = {**HELLO, "max_tokens": 300}
        expected = post(server, body).json()["choices"][0]["text"]
        thread = threading.Thread(target=lambda: neighbour.update(answer=post(server, body)))
        thread.start()
        number = {**HELLO, "structured_outputs": {"regex": "[0-9]{6}"}}
        answers = [post(server, number) for _ in range(8)]
        thread.join(240)
        assert neighbour["answer"].status_code == 200 and neighbour["answer"].json()["choices"][0]["text"] == expected
        failed = [answer for answer in answers if answer.status_code != 200]
        assert 1 <= len(failed) <= 2 and answers[-1].status_code == 200
        for answer in failed:
            assert answer.status_code == 500 and "injected at grammar" in answer.json()["error"]["message"]
        invariants.check(server_errors=2)


# ---- row 43: the machine ----

CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *shift;  /* seconds, in a file that the test writes */
static long shifted(void) {
    if (!shift) {
        int fd = open(getenv("CLOCK_FILE"), O_RDONLY);
        shift = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
    }
    return *shift;
}
int clock_gettime(clockid_t id, struct timespec *t) {
    int code = syscall(SYS_clock_gettime, id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += shifted();
    return code;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    int code = syscall(SYS_gettimeofday, t, zone);
    t->tv_sec += shifted();
    return code;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.slow
def test_row_43_a_clock_that_jumps_ends_nothing(serve, attacks, tmp_path):
    """By an hour, there and back, in the middle of answers that may take a quarter of one."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the clock that jumps")
    (tmp_path / "clock.c").write_text(CLOCK)
    library, file = tmp_path / "clock.so", tmp_path / "clock"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c"], check=True)
    file.write_bytes(bytes(8))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 8) as memory:
        shift = ctypes.c_long.from_buffer(memory)
        try:
            limits = ["--request-timeout", "900", "--queue-timeout", "900", "--stall-timeout", "300"]
            with serve(*limits, env={"LD_PRELOAD": str(library), "CLOCK_FILE": str(file)}) as server:
                invariants = attacks.Invariants(server)
                before = post(server, HELLO).json()
                for hours in (1, -1, 0):
                    body = {**HELLO, "max_tokens": 300, "stream": True, "logprobs": 5}
                    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=240) as answer:
                        lines = answer.iter_lines()
                        next(lines)
                        shift.value = hours * 3600
                        events = [line for line in lines if line]
                    assert events[-1] == "data: [DONE]" and json.loads(events[-2][6:])["choices"][0]["finish_reason"]
                    after = post(server, HELLO).json()
                    assert abs(after["created"] - before["created"] - hours * 3600) < 1800  # it did jump
                    assert after["choices"] == before["choices"]
                    invariants.check()
                assert invariants.metric("vllm:engine_stalls_total") == 0
                slowest = invariants.metric("vllm:e2e_request_latency_seconds_sum")
                assert 0 < slowest < 1800  # all of them together
        finally:
            del shift


@pytest.mark.slow
def test_row_43_a_full_shared_memory_is_none_of_our_business(helped):
    """No process has anything there, so that its being full (64 MiB in a container) stops nobody."""
    for pid in (helped.process.pid, *children(helped.process.pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a compiler's child that has ended
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
        assert not [file for file in files_of(pid) if file.startswith("/dev/shm")]


# ---- row 48: what is not there ----


@pytest.mark.slow
def test_row_48_no_helper_listens_either(helped):
    inodes = {
        file.removeprefix("socket:[").removesuffix("]")
        for pid in (helped.process.pid, *children(helped.process.pid))
        for file in files_of(pid)
    }
    listening = [
        fields[1]
        for table in ("tcp", "tcp6")
        for fields in (line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in inodes
    ]
    assert [address.rpartition(":")[2] for address in listening] == [f"{int(helped.url.rpartition(':')[2]):04X}"]
    # Unix sockets: pairs without a name, whose ends were handed over; nobody else can connect to them.
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    assert not [fields for fields in unix if fields[6] in inodes and len(fields) > 7]


@pytest.mark.slow
def test_row_48_no_check_is_an_assertion(serve, attacks):
    """With assertions off (python -O), what must be refused still is."""
    with serve("--max-body-size", "100000", env={"PYTHONOPTIMIZE": "1"}) as server:
        compiler_of(server)
        invariants = attacks.Invariants(server)
        for fields in (
            {"n": 0}, {"n": 10**9}, {"max_tokens": -1}, {"prompt": []}, {"prompt": [-1]}, {"prompt": [10**6]},
            {"prompt": [[1], "x"]}, {"prompt": [5] * 5000}, {"temperature": -1}, {"top_p": 0}, {"top_k": -2},
            {"logprobs": 10**6}, {"logit_bias": {"-1": 1}}, {"stop_token_ids": [10**6]}, {"seed": 2**64},
            {"allowed_token_ids": []}, {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"choice": []}},
            {"prompt_embeds": "AAAA"}, {"stream_options": {}}, {"cache_salt": ""}, {"min_tokens": 10**6},
        ):  # fmt: skip
            attacks.is_error(post(server, {**HELLO, **fields}), 400)
        for fields in ({"messages": []}, {"messages": [{"role": "x", "content": "y"}]}, {"chat_template": "{{ 1 }}"}):
            body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
            attacks.is_error(post(server, body, "/v1/chat/completions"), 400)
        attacks.is_error(httpx.post(f"{server.url}/v1/completions", content=b" " * 200_000, timeout=240), 413)
        invariants.check()
