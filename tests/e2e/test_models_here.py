"""pull, show, run, ps, stop and connect, against a hub of this machine: real processes, real downloads."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "configs" / "demo"
COMMIT = "0" * 39 + "1"
VSERVE = [sys.executable, "-m", "vserve.server.cli.main"]
SERVED = ["--device", "cpu", "--cpu-threads", "1", "--max-model-len", "512"]


class Hub:
    """The demo model as org/demo. `asked`: paths of its files and where the reading began; `broken_after`: bytes of
    the weights behind which a connection breaks, once."""

    def __init__(self) -> None:
        self.files = {file.name: file.read_bytes() for file in DEMO.iterdir() if file.is_file()}
        self.asked: list[tuple[str, int]] = []
        self.broken_after = 0
        self.refuses_weights = False


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """And the environment in which it is the hub."""
    shared = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/org/demo/resolve/{COMMIT}/").removeprefix("/org/demo/resolve/main/")
            if path in ("/api/models/org/demo", "/api/models/org/demo/revision/main"):
                siblings = [{"rfilename": file, "size": len(content)} for file, content in shared.files.items()]
                self.reply(json.dumps({"id": "org/demo", "sha": COMMIT, "siblings": siblings}).encode())
            elif path.startswith("/api/models/org/demo/tree/"):
                files = shared.files.items()
                self.reply(json.dumps([{"type": "file", "path": f, "size": len(c), "oid": "0" * 40} for f, c in files]))
            elif name in shared.files:
                self.file(name, shared.files[name])
            else:
                self.reply(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

        def file(self, name: str, content: bytes) -> None:
            start = int((self.headers.get("range") or "bytes=0-").split("=")[1].split("-")[0])
            if self.command == "GET":
                shared.asked.append((name, start))
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            cut, body = 0, content[start:]
            if name == "model.safetensors" and self.command == "GET":
                cut, shared.broken_after = shared.broken_after, 0
            self.reply(body, 206 if start else 200, headers, cut)

        def reply(self, body: bytes | str, code: int = 200, headers: Any = None, cut: int = 0) -> None:
            body = body if isinstance(body, bytes) else body.encode()
            self.send_response(code)
            for key, value in {"content-length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut] if cut else body)
                self.close_connection = bool(cut)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1", "HOME": str(tmp_path), "NO_COLOR": "1",
    }  # fmt: skip
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        environment.pop(name, None)
    yield shared, environment
    server.shutdown()
    server.server_close()


def vserve(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*VSERVE, *words], capture_output=True, text=True, timeout=300, env=environment, stdin=subprocess.DEVNULL
    )


def test_a_model_is_pulled_shown_and_removed(hub: tuple[Hub, dict[str, str]]) -> None:
    shared, environment = hub
    done = vserve(environment, "pull", "https://huggingface.co/org/demo")
    assert done.returncode == 0, done.stderr
    folder, last = done.stdout.splitlines()
    assert "serve it with `vserve org/demo`" in last and (Path(folder) / "model.safetensors").exists()
    assert "HTTP Request" not in done.stderr and "Fetching" not in done.stderr, "one line of our own, and no bars"
    pulled = len(shared.asked)
    again = vserve(environment, "pull", "org/demo")
    assert again.returncode == 0 and len(shared.asked) == pulled, "all of it was here"
    shown = vserve(environment, "show", "org/demo").stdout
    assert "LlamaForCausalLM (llama)" in shown and "4.5 million" in shown and re.search(r"tool calls +hermes", shown)
    assert "org/demo" in vserve(environment, "list").stdout
    # A file that has changed on the disk is found by its checksum.
    blob = os.path.realpath(Path(folder) / "model.safetensors")
    with open(blob, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")
    broken = vserve(environment, "pull", "org/demo")
    assert broken.returncode == 1 and "its checksum differs" in broken.stderr and blob in broken.stderr
    assert vserve(environment, "rm", "--yes", "org/demo").returncode == 0
    assert "org/demo" not in vserve(environment, "list").stdout


def test_what_cannot_be_had_or_served_is_told_before_the_weights_come(hub: tuple[Hub, dict[str, str]]) -> None:
    shared, environment = hub
    missing = vserve(environment, "pull", "org/nothing")
    assert missing.returncode == 1 and "cannot get org/nothing from the hub" in missing.stderr
    config = json.loads(shared.files["config.json"])
    shared.files["config.json"] = json.dumps(config | {"architectures": ["JambaForCausalLM"]}).encode()
    for command in (["pull", "org/demo"], ["org/demo", *SERVED]):
        refused = vserve(environment, *command)
        assert refused.returncode == 1 and "JambaForCausalLM is not served" in refused.stderr, refused.stderr
    assert "model.safetensors" not in {name for name, _ in shared.asked}


@pytest.mark.slow
def test_a_download_goes_on_where_it_was_broken_off(hub: tuple[Hub, dict[str, str]]) -> None:
    shared, environment = hub
    shared.files["model.safetensors"] = os.urandom(30 << 20)  # the library keeps pieces of ten million bytes
    shared.broken_after = 25 << 20
    done = vserve(environment, "pull", "org/demo")
    assert done.returncode == 0, done.stderr
    starts = [start for name, start in shared.asked if name == "model.safetensors"]
    assert starts[0] == 0 and len(starts) > 1 and starts[-1] > 0, starts


def test_a_model_is_run_listed_and_stopped(hub: tuple[Hub, dict[str, str]]) -> None:
    _, environment = hub
    done = vserve(environment, "run", "org/demo", "What is 12 + 30?", "--temperature-is-no-option")
    assert done.returncode == 2 and "unknown option" in done.stderr
    done = vserve(environment, "run", "org/demo", "What is 12 + 30?", "--keep", *SERVED)
    assert done.returncode == 0, done.stderr
    answer, note = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    port = re.search(r"vserve stop (\d+)", note)
    assert port is not None and "42" in answer, done.stdout
    try:
        rows = [json.loads(line) for line in vserve(environment, "ps", "--json").stdout.splitlines()]
        (mine,) = [row for row in rows if row["url"].endswith(f":{port[1]}")]
        assert mine["models"] == ["org/demo"] and mine["state"] == "ready" and mine["memory_bytes"] > 1e8
        assert abs(mine["started"] - time.time()) < 300
        # Who runs it again talks to the server that is there.
        began = time.monotonic()
        again = vserve(environment, "run", "org/demo", "What is 12 + 30?", *SERVED)
        assert "42" in again.stdout and "vserve stop" not in again.stdout, (again.stdout, time.monotonic() - began)
        busy = vserve(environment, "rm", "--yes", "org/demo")
        assert busy.returncode == 1 and f"`vserve stop {port[1]}` first" in busy.stderr
    finally:
        stopped = vserve(environment, "stop", port[1])
    assert stopped.returncode == 0 and "has ended" in stopped.stdout, stopped.stderr
    assert vserve(environment, "stop", port[1]).returncode == 2
