"""What happens when things die or cannot start: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest


def test_a_dead_engine_ends_a_server_that_must_not_restart_it(serve, until, is_gone):
    with serve("--engine-restarts", "0") as server:
        pid = server.engine_pid()
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == 1
        assert "killed by signal 9" in server.stderr[-1]
        assert is_gone(pid)


def test_no_engine_outlives_its_server(start_server, until, is_gone):
    server = start_server()
    pid = server.engine_pid()
    server.process.kill()
    until(lambda: is_gone(pid))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(start_server, is_gone, sig):
    server = start_server()
    pid = server.engine_pid()
    server.process.send_signal(sig)
    assert server.wait() == 0
    assert is_gone(pid)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vserve.server.cli.main", *arguments, "--port", "0", "--device", "cpu",
         "--cpu-threads", "1"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: shutil.rmtree(f), ["does not exist", "pass a folder"]),
        (lambda f: (f / "model.safetensors").unlink(), ["safetensors"]),
        (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
        (lambda f: (f / "config.json").write_text('{"architectures": ["Nobody"]}'), ["Nobody", "LlamaForCausalLM"]),
        (lambda f: os.truncate(f / "model.safetensors", 5000), ["model.safetensors"]),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line(tmp_path, tiny_model, change, words):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    change(folder)
    done = run(str(folder))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vserve: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in last, last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-model-len", "100000000"], ["--max-model-len", "100000000"]),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], ["64", "32", "--max-num-seqs"]),
        (["--gpu-memory-utilization", "1.5"], ["1.5"]),
        (["--block-size", "24"], ["24", "power of two"]),
        (["--num-gpu-blocks-override", "4", "--max-model-len", "1024"], ["--max-model-len 1024", "64 tokens"]),
    ],
)
def test_settings_that_cannot_work_are_one_line(arguments, words):
    done = run(*arguments)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vserve: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in last, last


@pytest.mark.slow
def test_row_45_of_two_servers_that_start_at_once_one_gets_the_port(launch_server, reserve_port, until):
    port = reserve_port()
    servers = [launch_server(port=port) for _ in range(2)]
    try:
        until(lambda: any(server.process.poll() is not None for server in servers))
        loser = min(servers, key=lambda server: server.process.poll() is None)
        assert loser.wait() == 2 and f":{port}" in loser.stderr[-1]
        until(lambda: servers[0].health() == {})
        assert sum(server.process.poll() is None for server in servers) == 1
    finally:
        for server in servers:
            server.process.kill()


def listening(pid: int) -> set[str]:
    """Addresses of the TCP and UDP sockets on which a process listens, as the kernel writes them."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (table.startswith("udp") or fields[3] == "0A"):
                found.add(fields[1])
    return found


def test_row_48_nothing_listens_but_the_http_port(demo_server):
    port = int(demo_server.url.rsplit(":", 1)[1])
    assert listening(demo_server.process.pid) == {f"00000000:{port:04X}"}
    assert listening(demo_server.engine_pid()) == set()


def test_row_48_no_pickle_on_any_socket():
    root = Path(__file__).parents[2]
    forbidden = re.compile(
        r"\b(pickle|cloudpickle|dill|marshal|shelve)\b\.|import (pickle|marshal)|torch\.load\(|\beval\("
    )
    for room in ("server", "engine", "kernels"):
        for file in (root / room).rglob("*.py"):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                harmless = ".eval()" in line or ("torch.load(" in line and "weights_only=True" in line)
                assert not forbidden.search(line) or harmless, f"{file}:{number}: {line}"


def test_a_port_in_use_is_said_at_once(demo_server):
    port = demo_server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "vserve.server.cli.main", "--port", port], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2 and f":{port}" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_context_shrinks_to_what_fits(serve):
    with serve("--num-gpu-blocks-override", "8") as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 128
    assert any("context cut" in line and "--num-gpu-blocks-override" in line for line in server.stderr)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    done = run("--uds", str(path))
    assert done.returncode == 2 and str(path) in done.stderr.strip().splitlines()[-1]
    assert path.read_text() == "mine"
