"""What a server process writes: one line a request, no prompts, nothing forged; and it lives when nobody reads it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

SECRET = "a secret that stays between us"
HOSTILE = 'x\r\n{"forged": 1}\n\x1b[31mred\x1b[0m\x85\u2028'
VSERVE = [sys.executable, "-m", "vserve.server.cli.main", "--device", "cpu", "--cpu-threads", "1"]


def chat(url: str, content: str = "What is 12 + 30?", request_id: str = "", **more: Any) -> httpx.Response:
    headers = {"x-request-id": request_id} if request_id else {}
    body = {"messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=240)


class Log:
    """The lines of a server that writes JSON."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.url = server.url

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.server.stderr]

    def find(self, which: Callable[[dict[str, Any]], bool], seconds: float = 240) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.lines():
                if which(line):
                    return line
            time.sleep(0.05)
        raise AssertionError("no such line among:\n" + "".join(self.server.stderr[-20:]))

    def of(self, request_id: str) -> dict[str, Any]:
        return self.find(lambda line: line.get("request_id") == request_id and "status" in line)


@pytest.fixture(scope="module")
def log(serve: Any) -> Iterator[Log]:
    with serve("--log-stats-interval", "0.5") as server:
        yield Log(server)


@pytest.fixture(scope="module")
def talkative(serve: Any) -> Iterator[Log]:
    options = ["--enable-log-requests", "--enable-log-outputs", "--max-log-len", "60", "--no-access-log"]
    with serve(*options, "--disable-log-stats") as server:
        yield Log(server)


@pytest.mark.slow
def test_one_line_a_request(log: Log) -> None:
    # Long enough that the tokens cannot all be read at one moment, however busy the machine is.
    usage = chat(log.url, request_id="whole", n=2, max_tokens=600, ignore_eos=True).json()["usage"]
    chat(log.url, request_id="streamed", stream=True)
    chat(log.url, request_id="refused", n=0)
    httpx.get(f"{log.url}/no/such/path", headers={"x-request-id": "lost"})
    line = log.of("whole")
    assert line["prompt_tokens"] == usage["prompt_tokens"] and line["completion_tokens"] == usage["completion_tokens"]
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["client"] == "127.0.0.1" and line["finish_reason"] in ("length", "stop", "stop,length", "length,stop")
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"]
    assert 0 < line["tpot_seconds"] < line["seconds"]
    assert (line["level"], line["process"], line["logger"]) == ("info", "api", "vserve.request")
    assert log.of("streamed")["completion_tokens"] > 1
    refused = log.of("refused")
    assert refused["status"] == 400 and "prompt_tokens" not in refused
    lost = log.of("lost")
    assert (lost["status"], lost["route"], lost["path"]) == (404, "none", "/no/such/path")
    assert all(
        sum(line.get("request_id") == id for line in log.lines()) == 1 for id in ("whole", "streamed", "refused")
    )


@pytest.mark.slow
def test_disconnect_is_an_abort(log: Log) -> None:
    url = f"{log.url}/v1/completions"
    body = {"prompt": "Count from 1 to 20.", "stream": True, "max_tokens": 100, "ignore_eos": True, "min_tokens": 100}
    with httpx.stream("POST", url, json=body, headers={"x-request-id": "left"}, timeout=240) as response:
        next(response.iter_raw(1))
    line = log.of("left")
    assert line["finish_reason"] in ("abort", "length")  # the last token may have come first
    assert line["prompt_tokens"] > 0


@pytest.mark.slow
def test_probes_leave_no_lines(log: Log) -> None:
    for path in ("/health", "/livez", "/readyz", "/metrics", "/version"):
        httpx.get(log.url + path, headers={"x-request-id": "probe"})
    chat(log.url, request_id="after-probes")
    log.of("after-probes")
    assert not [line for line in log.lines() if line.get("request_id") == "probe"]


@pytest.mark.slow
def test_row_47_log_injection(log: Log) -> None:
    """Prompts, ids, paths and parameters with line breaks and escape codes: JSON lines, nothing of the prompt."""
    chat(log.url, SECRET + HOSTILE, "quiet-one")
    chat(log.url, "hi", stop=[HOSTILE], cache_salt=HOSTILE)
    httpx.post(f"{log.url}/v1/chat/completions", json={"messages": SECRET + HOSTILE, "model": HOSTILE}, timeout=240)
    host, port = log.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=240) as raw:
        raw.sendall(b"GET /a%0d%0a{%22forged%22:1}%1b[31m HTTP/1.1\r\nhost: x\r\nx-request-id: [31mi\x9bd\r\n\r\n")
        assert b" 404 " in raw.recv(1000)
    assert log.of("31mid")["path"] == '/a\\r\\n{"forged":1}\\x1b[31m'
    log.of("quiet-one")
    text = "".join(log.server.stderr)
    assert SECRET not in text and text.isascii() and text.replace("\n", "").isprintable()
    assert not [line for line in log.lines() if "forged" in line]


@pytest.mark.slow
def test_stats_line_while_busy_only(log: Log, until: Any) -> None:
    end = time.monotonic() + 60
    seen: dict[str, Any] = {}
    while time.monotonic() < end and not seen.get("generation_tokens_per_second"):
        chat(log.url, "Count from 1 to 9.")
        seen = next((line for line in log.lines()[::-1] if line["logger"] == "vserve.stats"), seen)
    assert seen["message"].startswith("Avg prompt throughput: ") and " tokens/s, Running: " in seen["message"]
    assert "GPU KV cache usage: " in seen["message"] and seen["message"].endswith("%, Preemptions: 0")
    assert seen["preemptions"] == 0
    assert seen["generation_tokens_per_second"] > 0 and seen["running"] >= 0

    def is_quiet() -> bool:
        """For as long as it takes to write three lines; the last one may come late."""
        count = sum(line["logger"] == "vserve.stats" for line in log.lines())
        time.sleep(1.5)
        return sum(line["logger"] == "vserve.stats" for line in log.lines()) == count

    until(is_quiet)


@pytest.mark.slow
def test_both_processes_write_alike(log: Log) -> None:
    lines = log.lines()  # raises where any line is not JSON
    assert {line["process"] for line in lines} == {"api", "engine"}
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)


@pytest.mark.slow
def test_text_is_logged_when_asked_for(talkative: Log) -> None:
    answer = chat(talkative.url, "What is 12 + 30?" + "x" * 100, "one").json()["choices"][0]["message"]["content"]
    chat(talkative.url, "What is 1 + 1?" + "\x1b[31m\r\n", "two", stream=True)
    prompt = talkative.find(lambda line: line.get("request_id") == "one" and "prompt" in line)
    assert "What is 12 + 30?" in prompt["prompt"] and len(prompt["prompt"]) == 60
    assert "max_tokens=" in prompt["sampling"]
    output = talkative.find(lambda line: line.get("request_id") == "one" and "output" in line)
    assert output["output"] == answer[:60] and output["finish_reason"] == "stop"
    streamed = talkative.find(lambda line: line.get("request_id") == "two" and "output" in line)
    assert streamed["output"] and streamed["index"] == 0
    assert not [line for line in talkative.lines() if "status" in line]  # --no-access-log


# ---- when nobody reads ----


def start(redirections: str, *options: str) -> subprocess.Popen[bytes]:
    """A server whose output goes where the shell is told."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", *VSERVE, *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_until_ready(process: subprocess.Popen[Any], url: str, said: bytes | bytearray = b"") -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        assert process.poll() is None, f"exit code {process.returncode}: {said.decode()}"
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError("not ready")


@pytest.mark.slow
@pytest.mark.parametrize("redirections", [">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_row_43_output_gone(redirections: str, reserve_port: Any) -> None:
    port = reserve_port()
    process = start(redirections, "--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url)
        assert all(chat(url, max_tokens=3).status_code == 200 for _ in range(5))
        lost = next(line for line in httpx.get(f"{url}/metrics").text.splitlines() if "log_lines_lost_total{" in line)
        if "full" in redirections:
            assert float(lost.split()[-1]) >= 5
        process.terminate()
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.slow
def test_row_43_reader_gone_and_reader_stalled(reserve_port: Any) -> None:
    """A pipe whose reader stops reading must not stop the server, nor one whose reader has left (SIGPIPE)."""
    port = reserve_port()
    process = subprocess.Popen(
        [*VSERVE, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url)
        path = "/" + "x" * 190
        with httpx.Client(base_url=url) as client:
            for _ in range(400):  # more than the 64 KiB that a pipe holds
                assert client.get(path).status_code == 404
        assert chat(url, max_tokens=3).status_code == 200
        process.stdout.close()
        process.stderr.close()
        assert chat(url, max_tokens=3).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.slow
def test_text_on_a_terminal(reserve_port: Any, until: Any) -> None:
    port = reserve_port()
    master, slave = pty.openpty()
    process = subprocess.Popen([*VSERVE, "--port", str(port)], stdout=slave, stderr=slave)
    os.close(slave)
    screen = bytearray()

    def read() -> None:
        try:
            while data := os.read(master, 4096):
                screen.extend(data)
        except OSError:
            pass

    threading.Thread(target=read, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url, screen)
        chat(url, request_id="human")
        until(lambda: re.search(rb"human[^\n]*\n", screen))  # the whole line: it may come in pieces
        (line,) = [line for line in screen.decode().splitlines() if "human" in line]
        assert " INFO 127.0.0.1 POST /v1/chat/completions 200 in " in line
        assert " cached) + " in line and "TTFT" in line and "TPOT" in line and line.rstrip().endswith("stop")
    finally:
        process.kill()
        process.wait(60)
        os.close(master)


@pytest.mark.parametrize(
    "option, value", [("max_log_len", -1), ("log_stats_interval", 0.0), ("log_format", "xml"), ("log_level", "loud")]
)
def test_bad_settings(option: str, value: Any) -> None:
    from vserve.engine.errors import ConfigError
    from vserve.server.options.config import ServerConfig

    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")):
        ServerConfig(**{option: value})
