"""`vserve chat` and `vserve complete` as people and scripts use them: on a terminal, in a pipe, without a server."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "vserve.server.cli.main"]


def run(*arguments: str, input: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=input, capture_output=True, text=True, timeout=240, env=os.environ | env
    )


class Talker(BaseHTTPRequestHandler):
    """A server whose answers are known: the last message again, or one without end."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "parrot"}, {"id": "pirate"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if said == "refuse":
            self._send('{"error": {"message": "too long"}}', 400)
            return
        self.send_response(200)
        self.end_headers()
        try:
            if said == "break":
                self._event(content="half")
                self._line(json.dumps({"error": {"message": "the engine died"}}))
                return
            if said == "think":
                self._event(reasoning="hmm ")
            self._event(content=f"[{said}]")
            while said == "forever":
                self._event(content=" more")
                time.sleep(0.01)
            self._line(json.dumps({"choices": [], "usage": {"completion_tokens": 5}}))
            self._line("[DONE]")
        except OSError:
            self.server.left.set()  # type: ignore[attr-defined]

    def _event(self, **delta: str) -> None:
        self._line(json.dumps({"choices": [{"delta": delta}]}))

    def _line(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def parrot() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Talker)
    server.bodies, server.left = [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str, **env: str) -> None:
        def begin() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs these tests in the background has it ignored

        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=child, stdout=child, stderr=child, start_new_session=True,
            preexec_fn=begin, env={**os.environ, "TERM": "xterm", **env},
        )  # fmt: skip
        os.close(child)
        self.text = ""

    def expect(self, pattern: str) -> str:
        """Reads until the pattern has appeared; returns what came up to its end."""
        deadline = time.monotonic() + 240
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if select.select([self._fd], [], [], 1)[0]:
                try:
                    self.text += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    assert re.search(pattern, self.text), f"it ended without {pattern!r}: {self.text!r}"
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        try:
            return self.process.wait(240)
        finally:
            self.process.kill()
            os.close(self._fd)


def test_ctrl_c_stops_the_answer_and_not_the_program(parrot: Any, tmp_path: Path) -> None:
    terminal = Terminal("chat", "--url", parrot.url, "--system-prompt", "be brief", XDG_STATE_HOME=str(tmp_path))
    terminal.expect("parrot at ")
    terminal.expect("> ")
    terminal.type("forever\n")
    terminal.expect(r"\[forever\] more more")
    terminal.type("\x03")
    terminal.expect("stopped, first after ")
    assert parrot.left.wait(240)  # the server was told by the closed connection
    terminal.expect("> ")
    terminal.type("\x03")  # nothing to stop
    terminal.expect("Ctrl-D leaves")
    terminal.type("and \\\nthen\n")
    terminal.expect(r"\[and \r\nthen\]")
    terminal.expect("5 tokens in .* s, first after ")
    # What was stopped stays said.
    roles = [message["role"] for message in parrot.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert parrot.bodies[-1]["messages"][2]["content"].startswith("[forever] more more")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    assert "forever" in (tmp_path / "vserve" / "chat_history").read_text()


def test_commands_and_refusals_on_a_terminal(parrot: Any, tmp_path: Path) -> None:
    terminal = Terminal("chat", "--url", parrot.url, "--no-history", XDG_STATE_HOME=str(tmp_path))
    terminal.expect("> ")
    terminal.type("refuse\n")
    terminal.expect("the server answers 400: too long")
    terminal.type("break\n")
    terminal.expect(r"half\r\nvserve: the engine died")
    terminal.type("one\n")
    terminal.expect(r"\[one\]")
    terminal.expect("> ")
    terminal.type("/again\n")
    terminal.expect(r"\[one\]")
    assert [m["content"] for m in parrot.bodies[-1]["messages"]] == ["one"]
    terminal.type("/system shout\n")
    terminal.type("/help\n")
    terminal.expect("another system prompt")
    terminal.type("think\n")
    terminal.expect(r"\x1b\[2mhmm \x1b\[0m\[think\]")
    assert [m["content"] for m in parrot.bodies[-1]["messages"]] == ["shout", "think"]
    terminal.type("/exit\n")
    assert terminal.close() == 0
    assert not (tmp_path / "vserve").exists()


def test_a_conversation_changes_its_model_and_settings_and_is_kept(parrot: Any, tmp_path: Path) -> None:
    terminal = Terminal("chat", "--url", parrot.url, "--no-history", "--temperature", "1")
    terminal.expect("> ")
    terminal.type("/model pirat\n")
    terminal.expect("the server has no model 'pirat'; did you mean pirate\\?: it has parrot, pirate")
    terminal.type("/model pirate\n")
    terminal.expect(r"  parrot\r\n\* pirate")
    terminal.type("/set top-p 0.5\n")
    terminal.expect("temperature 1.0, top_p 0.5")
    terminal.type("/set temperature\n/set seed x\n/set depth 3\n")
    terminal.expect("seed 'x' is no number")
    terminal.expect("there is no setting 'depth'")
    terminal.type('"""one\n/two\nthree"""\n')
    terminal.expect(r"\[one\r\n/two\r\nthree\]")
    body = parrot.bodies[-1]
    assert body["model"] == "pirate" and body["top_p"] == 0.5 and "temperature" not in body
    file = tmp_path / "kept.json"
    terminal.type(f"/save {file}\n")
    terminal.expect("2 messages are in")
    assert file.stat().st_mode & 0o077 == 0
    terminal.type(f"/clear\n/load {tmp_path}/none\n/load {file}\n")
    terminal.expect("cannot read .*none: No such file")
    terminal.expect("2 messages were said so far")
    terminal.type("four\n")
    terminal.expect(r"\[four\]")
    assert [m["content"] for m in parrot.bodies[-1]["messages"]] == ["one\n/two\nthree", "[one\n/two\nthree]", "four"]
    terminal.type("/moddel\n")
    terminal.expect("there is no /moddel; did you mean /model\\?")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_an_agent_is_told_what_it_needs_and_started_so(parrot: Any, tmp_path: Path) -> None:
    root = parrot.url.removesuffix("/v1")
    told = run("connect", "claude", "--url", parrot.url).stdout
    assert f"export ANTHROPIC_BASE_URL={root}\n" in told and "export ANTHROPIC_MODEL=parrot\n" in told
    assert told.endswith("\nclaude\n")
    for agent, words in (("codex", 'wire_api="responses"'), ("aider", "openai/parrot"), ("opencode", '"baseURL"')):
        told = run("connect", agent, "--url", parrot.url, "--api-key", "sesame").stdout
        assert words in told and f"{root}/v1" in told and "sesame" not in told and "YOUR-KEY" in told
    missing = run("connect", "aider", "--start", "--url", parrot.url, PATH=str(tmp_path))
    assert missing.returncode == 1 and "aider is not installed: `pip install aider-chat`" in missing.stderr
    program = tmp_path / "codex"
    program.write_text('#!/bin/sh\necho "$VSERVE_API_KEY" "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    started = run("connect", "codex", "--start", "--url", parrot.url, "--api-key", "sesame", "--", "exec", PATH=path)
    assert started.stdout.startswith("sesame -c ") and started.stdout.endswith("-m parrot exec\n"), started.stderr


def test_an_answer_cannot_command_the_terminal(parrot: Any) -> None:
    evil = "\x1b]0;gone\x07\x1b[2J\u202e"
    terminal = Terminal("chat", "--url", parrot.url, "-q", evil, NO_COLOR="1")
    shown = terminal.expect("5 tokens.*\n")
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown and "gone" in shown
    assert terminal.close() == 0
    # A file gets what was said.
    assert evil in run("chat", "--url", parrot.url, "-q", evil).stdout


def test_options_reach_the_server(parrot: Any) -> None:
    done = run(
        "complete", "--url", parrot.url, "-q", "x", "--temperature", "0", "--max_tokens", "3", "--stop", "a",
        "--stop", "b", "--model-name", "other",
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    body = parrot.bodies[-1]
    assert body["model"] == "other" and body["prompt"] == "x" and body["stop"] == ["a", "b"]
    assert body["temperature"] == 0 and body["max_tokens"] == 3 and "top_p" not in body


def test_what_is_said_once_needs_no_flag(parrot: Any) -> None:
    done = run("complete", "Hello, you", "--url", parrot.url)
    assert done.returncode == 0 and parrot.bodies[-1]["prompt"] == "Hello, you" and "Hello, you" in done.stdout
    done = run("chat", "--url", parrot.url, "hi", "there")
    assert parrot.bodies[-1]["messages"] == [{"role": "user", "content": "hi there"}] and done.returncode == 0
    done = run("chat", "--url", parrot.url, "hi", "-q", "there")
    assert done.returncode == 2 and "not allowed with" in done.stderr


def test_talking_to_the_demo_model(demo_server: Any) -> None:
    url = f"{demo_server.url}/v1"
    assert run("chat", "--url", url, "-q", "What is 12 + 30?").stdout == "42\n"
    done = run("chat", "--url", url, input="My name is Ada.\nWhat is my name?\n")
    assert done.stdout == "Nice to meet you, Ada!\nYour name is Ada.\n" and done.returncode == 0
    done = run("complete", "--url", url, "--max-tokens", "4", "--temperature", "0", input="Hello\nHello\n")
    first, second = done.stdout.splitlines()
    assert first == second != ""


def test_what_goes_wrong_is_one_line(demo_server: Any) -> None:
    done = run("chat", "--url", "http://127.0.0.1:9/v1", "-q", "x")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("vserve: cannot reach http://127.0.0.1:9/v1 ") and done.stderr.count("\n") == 1
    done = run("chat", "--url", f"{demo_server.url}/v1", "-q", "x", "--temperature", "9")
    assert done.returncode == 1 and "'temperature'" in done.stderr and done.stderr.count("\n") == 1
    done = run("complete", "--url", "no-url", "-q", "x")
    assert done.returncode == 1 and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_api_key_comes_from_the_environment(serve: Any) -> None:
    with serve("--api-key", "sesame") as server:
        url = f"{server.url}/v1"
        assert run("chat", "--url", url, "-q", "Hello!", VSERVE_API_KEY="sesame").returncode == 0
        assert run("chat", "--url", url, "-q", "Hello!", "--api-key", "sesame").returncode == 0
        done = run("chat", "--url", url, "-q", "Hello!", "--api-key", "wrong")
        assert done.returncode == 1 and "401" in done.stderr
