"""What happens when things die or cannot start: real processes, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_pid(server) -> int:
    (pid,) = [
        p for p in children(server.process.pid) if b"vserve.engine.process" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]
    return pid


def gone(pid: int, seconds: float = 5) -> bool:
    for _ in range(int(seconds * 20)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_dead_engine_fails_every_open_request_and_the_server_says_why(serve):
    with serve() as server:
        body = dict(model="demo", prompt="go on", max_tokens=1900, ignore_eos=True)
        answers: dict[str, object] = {}

        def whole():
            answers["whole"] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)

        def streamed():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=30) as r:
                answers["stream"] = r.read().decode()

        threads = [threading.Thread(target=whole), threading.Thread(target=streamed)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        pid = engine_pid(server)
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - started < 5
        assert answers["whole"].status_code == 503
        assert "killed by signal 9" in answers["whole"].json()["error"]["message"]
        events = answers["stream"].strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert "killed by signal 9" in json.loads(events[-2][6:])["error"]["message"]
        assert server.wait() == 1
        assert "killed by signal 9" in server.stderr[-1]
        assert gone(pid)


def test_no_engine_outlives_its_server(start_server):
    server = start_server()
    pid = engine_pid(server)
    server.process.kill()
    assert gone(pid)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(start_server, sig):
    server = start_server()
    pid = engine_pid(server)
    server.process.send_signal(sig)
    assert server.wait() == 0
    assert gone(pid)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vserve.server.cli.main", *arguments, "--port", "0", "--device", "cpu"],
        capture_output=True, text=True, timeout=60,
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


def test_a_port_in_use_is_said_at_once(demo_server):
    port = demo_server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "vserve.server.cli.main", "--port", port], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and f":{port}" in done.stderr.strip().splitlines()[-1]


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
