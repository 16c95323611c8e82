"""Starts as a user's are, by the interpreter, and what tells them from the forked ones of the other files."""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

VSERVE = [sys.executable, "-m", "vserve"]
SERVER = [*VSERVE, "--device", "cpu", "--cpu-threads", "1", "--port", "0"]
BODY = {"messages": [{"role": "user", "content": "Hello!"}], "logprobs": True, "temperature": 0, "max_tokens": 12}


def libraries(pid: int) -> set[str]:
    return {line.rpartition("/")[2].split(".")[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}


def said(url: str) -> Any:
    answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.true_start
def test_torch_is_for_the_engine_only(start_server: Callable[..., Any]) -> None:
    """Importing torch or transformers takes seconds, and hundreds of megabytes."""
    server = start_server()
    said(server.url)
    assert "libtorch_cpu" in libraries(server.engine_pid())
    assert "libtorch_cpu" not in libraries(server.process.pid)
    server.process.terminate()
    assert server.wait() == 0


def state(pid: int) -> dict[str, list[int]]:
    """What the kernel knows of a process, whose numbers a start decides."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return {
        "parent": [int(fields[1])],
        "session and group": [int(fields[3] == str(pid)), int(fields[2] == str(pid))],
        "signals": [int(status[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")],
        "descriptors": sorted(int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir() if int(file.name) < 3),
    }


def compared(**options: Any) -> list[tuple[Any, ...]]:
    """A server that was started with these options of Popen, and its engine, once they are ready, as the kernel and
    whoever waits for them see them; of a true start and of a forked one."""
    process = subprocess.Popen(SERVER, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    with process:
        try:
            assert process.stdout is not None
            url = next(found[1] for line in process.stdout if (found := re.match(r"(http://\S+)", line)))
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0") for pid in children}
            (engine,) = (pid for pid, line in lines.items() if b"vserve.engine.start.process" in line)
            line = re.sub(rb"\b\d+\b", b"N", lines[engine])
            own = Path(f"/proc/{process.pid}/cmdline").read_bytes().strip(b"\0")
            cwd = os.readlink(f"/proc/{process.pid}/cwd")
            states = [state(process.pid), state(engine)]
            assert [one.pop("parent") for one in states] == [[os.getpid()], [process.pid]]
            answer = said(url.replace("localhost", "127.0.0.1"))
            return [own, line, cwd, *states, answer]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(240) == 0


def test_a_forked_server_is_as_one_that_was_started(tmp_path: Path, honestly: Callable[..., Any]) -> None:
    """To the kernel, to its parent, and in what it answers."""
    options = {"cwd": tmp_path, "start_new_session": True, "stdin": subprocess.DEVNULL}
    assert compared(**options) == honestly(compared, **options)


@pytest.mark.parametrize("arguments", [["version"], ["serve", "--no-such-option"], ["sevre"]])
def test_a_forked_command_is_as_one_that_was_started(arguments: list[str], honestly: Callable[..., Any]) -> None:
    def run() -> tuple[int, str, str]:
        done = subprocess.run([*VSERVE, *arguments], capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout, done.stderr

    assert run() == honestly(run)


def test_without_its_zygote_a_command_starts_as_ever(
    zygote: Any, load_module: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, honestly: Callable[..., Any]
) -> None:
    """And the tests say why they take so long, once."""
    module = load_module(Path(__file__).parents[1] / "zygote.py")
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(subprocess.Popen, "_execute_child", subprocess.Popen._execute_child)  # type: ignore[attr-defined]

    def run() -> None:
        done = subprocess.run([*VSERVE, "version"], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0 and done.stdout.startswith("vserve ")

    def twice() -> None:
        module.fork_through(module.Zygote(ours, os.environ))
        with pytest.warns(UserWarning, match="servers start slowly"):
            run()
        with warnings.catch_warnings(action="error"):
            run()

    honestly(twice)


@pytest.mark.parametrize(
    "options",
    [
        {"args": [sys.executable, "-c", "print()"]},
        {"args": [sys.executable, "-m", "json.tool"]},
        {"args": "python -m vserve", "shell": True},
        {"args": [*VSERVE, "version"], "preexec_fn": int},
        {"args": [*VSERVE, "version"], "umask": 0},
        {"args": [*VSERVE, "version"], "env": {**os.environ, "LD_PRELOAD": "/lib/x.so"}},
        {"args": [*VSERVE, "version"], "env": {**os.environ, "OMP_NUM_THREADS": "7"}},
        {"args": [*VSERVE, "version"], "env": {"PATH": "/bin"}},
    ],
    ids=["code", "other module", "shell", "between fork and exec", "umask", "preload", "threads", "environment"],
)
def test_what_decides_before_the_first_line_is_not_forked(
    options: dict[str, Any], load_module: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused for one reason: what is not refused is the same without it."""
    calls: list[dict[str, Any]] = []

    def execute(*arguments: Any) -> None:
        calls.append(inspect.signature(real).bind(*arguments).arguments)
        raise FileNotFoundError

    real = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    monkeypatch.setattr(subprocess.Popen, "_execute_child", execute)
    for arguments in (options, {"args": [*VSERVE, "version"]}):
        with pytest.raises(FileNotFoundError):
            subprocess.Popen(**arguments)
    zygote = load_module(Path(__file__).parents[1] / "zygote.py").Zygote()
    assert [zygote.takes(call) for call in calls] == [False, True]


@pytest.fixture
def honestly(zygote: Any) -> Callable[..., Any]:
    """honestly(work, …) → what work(…) returns, by starts that are not forked."""

    def work_so(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        zygote.resting = True
        try:
            return work(*arguments, **options)
        finally:
            zygote.resting = False

    return work_so
