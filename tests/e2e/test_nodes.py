"""One engine over two hosts, which are two loopback addresses here: the same answers as of one process, and what
becomes of it when a rank or a whole node is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

SECRET = {"VSERVE_CLUSTER_SECRET": "of these two"}


@dataclass
class Hosts:
    e2e: Any  # conftest.py of this folder
    options: list[str]
    first: Any = None
    second: Any = None

    def start_second(self) -> None:
        self.second = self.e2e.launch(
            *self.options,
            "--node-rank",
            "1",
            "--headless",
            "--host-ip",
            "127.0.0.2",
            "--cpu-threads",
            "1",
            env=SECRET,
        )

    def rank_of_second(self) -> int:
        pid = self.second.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (rank,) = (int(pid) for pid in children if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return rank

    def said(self, text: str, seconds: float) -> str:
        """The line of node 0 that has it."""
        begun = time.monotonic()
        while not (lines := [line for line in self.first.stderr if text in line]):
            assert time.monotonic() - begun < seconds, "".join(self.first.stderr)
            time.sleep(0.05)
        return str(lines[-1])

    def serves_again(self) -> None:
        self.e2e.wait_until(lambda: httpx.get(f"{self.first.url}/readyz").status_code == 200)


@contextmanager
def two_hosts(e2e: Any, port: int, *options: str) -> Iterator[Hosts]:
    made = Hosts(e2e, [str(e2e.DEMO), *options, "--nnodes", "2", "--master-port", str(port)])
    made.start_second()  # it waits
    made.first = e2e.launch(*made.options, "--cpu-threads", "2", env=SECRET)
    try:
        e2e.announced(made.first)
        yield made
    finally:
        for server in (made.first, made.second):
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def e2e(load_module: Any) -> Any:
    return load_module(Path(__file__).with_name("conftest.py"))


@pytest.fixture(scope="module")
def hosts(e2e: Any, reserve_port: Callable[[], int]) -> Iterator[Hosts]:
    with two_hosts(e2e, reserve_port(), "-tp", "2") as made:
        yield made


def answers(url: str) -> list[Any]:
    found = []
    for prompt in ("What is 12 + 30?", "The capital of France is", "Once upon a time"):
        body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found.append(response.json()["choices"][0]["token_ids"])
    return found


@pytest.mark.slow
def test_the_same_tokens_as_one_process(hosts: Hosts) -> None:
    found = answers(hosts.first.url)
    assert all(len(tokens) == 24 for tokens in found) and len({tuple(tokens) for tokens in found}) == 3
    with hosts.e2e.serving(str(hosts.e2e.DEMO)) as alone:
        assert answers(alone.url) == found
    assert any("node 1 is there, from 127.0.0.2" in line for line in hosts.first.stderr)


@pytest.mark.slow
def test_each_node_has_threads_of_its_own(hosts: Hosts) -> None:
    told = Path(f"/proc/{hosts.rank_of_second()}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=1" in told


@pytest.mark.slow
def test_a_rank_of_the_other_node_is_killed(hosts: Hosts, slowness: float) -> None:
    before = answers(hosts.first.url)
    os.kill(hosts.rank_of_second(), signal.SIGKILL)
    hosts.said("rank 1 of 2 (cpu) on node 1 (127.0.0.2) was killed by signal 9 (SIGKILL)", 10 * slowness)
    hosts.serves_again()
    assert answers(hosts.first.url) == before, "the node has dialled in again"


@pytest.mark.slow
def test_the_other_node_is_lost(hosts: Hosts, slowness: float) -> None:
    rank = hosts.rank_of_second()
    hosts.second.process.kill()
    hosts.said("rank 1 of 2 (cpu) on node 1 (127.0.0.2) is lost: its node has hung up", 10 * slowness)
    hosts.e2e.wait_until(lambda: hosts.e2e.gone(rank), 10 * slowness)
    hosts.start_second()
    hosts.serves_again()
    answers(hosts.first.url)


@pytest.mark.slow
def test_the_other_host_falls_silent(hosts: Hosts, slowness: float) -> None:
    """As one does whose power has gone: no connection is closed."""
    rank = hosts.rank_of_second()
    for pid in (hosts.second.process.pid, rank):
        os.kill(pid, signal.SIGSTOP)
    hosts.said("rank 1 of 2 (cpu) on node 1 (127.0.0.2) is lost: its host has been silent for 6 s", 6 + 4 * slowness)
    for pid in (hosts.second.process.pid, rank):
        os.kill(pid, signal.SIGCONT)
    hosts.serves_again()


def test_both_end_in_order(hosts: Hosts) -> None:
    """The last of the tests with these two: a container's runtime ends both at once."""
    hosts.second.process.terminate()
    time.sleep(0.5)
    assert hosts.second.process.poll() is None, "requests may still run"
    hosts.first.process.terminate()
    assert hosts.first.wait(30) == 0
    assert hosts.second.wait(30) == 0
    assert any("node 0 has ended in order" in line for line in hosts.second.stderr)


@pytest.mark.slow
def test_a_stage_on_each_host(e2e: Any, reserve_port: Callable[[], int], slowness: float) -> None:
    """Of two ranks: both answer with the tokens of one process, and a lost stage is named."""
    with two_hosts(e2e, reserve_port(), "-tp", "2", "-pp", "2") as made, e2e.serving(str(e2e.DEMO)) as alone:
        assert answers(made.first.url) == answers(alone.url)
        made.second.process.kill()
        assert "of 4 (cpu) on node 1 (127.0.0.2) is lost: its node has hung up" in made.said("is lost", 10 * slowness)


def refused(*options: str) -> str:
    command = [sys.executable, "-m", "vserve.server.cli.main", "o/m", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2) and done.stderr.startswith("vserve: "), done.stderr
    return done.stderr.splitlines()[-1]


def test_nobody_answers(reserve_port: Callable[[], int]) -> None:
    options = ["-tp", "2", "--nnodes", "2", "--node-rank", "1", "--headless", "--distributed-timeout-seconds", "1"]
    line = refused(*options, "--master-port", str(port := reserve_port()), "--log-level", "error")
    assert f"node 0 has not answered at 127.0.0.1:{port} within 1 s (--distributed-timeout-seconds;" in line


def test_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    from vserve.server.cli.main import main

    def said(*options: str) -> str:
        assert main(["serve", "o/m", *options]) == 2
        return capsys.readouterr().err.removeprefix("vserve: ")

    both = ["-tp", "2", "--nnodes", "2"]
    assert said(*both, "--master-addr", "10.1.2.3").startswith("--nnodes 2: other hosts reach node 0 at 10.1.2.3, who")
    assert said(*both, "--node-rank", "1").startswith("--node-rank 1: only node 0 answers HTTP: add --headless")
    assert said(*both, "--headless").startswith("--headless is for every node but the first")
    assert said(*both, "--node-rank", "2").startswith("--node-rank 2: --nnodes is 2, and the first node is 0")
    assert said("-tp", "3", "--nnodes", "2").startswith("--nnodes 2: 3 ranks (--tensor-parallel-size 3) cannot")
    assert said(*both, "-dp", "2").startswith("--nnodes 2 divides one engine, and --data-parallel-size is 2")
    assert said(*both, "--distributed-executor-backend", "ray").startswith("--nnodes 2 is for --distributed-executor")
    assert said("-tp", "2", "--distributed-executor-backend", "uni").startswith("--distributed-executor-backend uni")
    line = said("--distributed-executor-backend", "external_launcher")
    assert line.startswith("--distributed-executor-backend external_launcher is for programs that torchrun starts")
