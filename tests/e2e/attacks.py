"""What every attack has in common: raw bytes over a socket, and what must be true of the server afterwards."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

CANARY = {"model": "demo", "prompt": "What is 12 + 30?", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
MAX_GROWTH = 50 << 20  # bytes of resident memory
PATIENCE = 120.0  # seconds, for whatever the server has to do; it may share its cores


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    address = urlsplit(url)
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(PATIENCE)
    sock.connect((address.hostname, address.port))
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes the connection."""
    data = b""
    try:
        while chunk := sock.recv(1 << 16):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one answer; the connection may live on."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = sock.recv(1 << 16)
        assert chunk, f"the connection was closed after {data!r}"
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers["content-length"])
    while len(body) < length:
        chunk = sock.recv(1 << 16)
        assert chunk, "the connection was closed in the body"
        body += chunk
    return int(status_line.split()[1]), headers, body


def exchange(url: str, *pieces: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Sends the pieces and reads until the server closes. → [(status, error object or {})] of all answers."""
    with connect(url) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered before it had read everything
        return answers(read_all(sock))


def answers(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    found = []
    while match := re.match(rb"HTTP/1.1 (\d+) ", data):
        head, _, rest = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        body, data = rest[: int(length[1])], rest[int(length[1]) :]
        found.append((int(match[1]), json.loads(body).get("error", {}) if body else {}))
    assert not data, data
    return found


def post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    """A whole request."""
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def is_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer that has the shape of OpenAI's and tells nothing of the machine."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    tells_nothing(response.text)
    return error


def tells_nothing(text: str) -> None:
    """Row 28."""
    for secret in ("Traceback", ".py", "/work", "/root", "/home", "site-packages", ", line ", str(Path.home()) + "/"):
        assert secret not in text, text


class Invariants:
    """Made before the attack; `check` after it."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self._http = httpx.Client(base_url=server.url, timeout=240)
        self.canary = self._canary()
        self.children = set(server.children())
        self.server_errors = sum_of(settled(self._http), "http_requests_total", 'status="5xx"')
        self.memory = self._memory()

    def check(self, server_errors: int = 0, max_growth: int = MAX_GROWTH) -> None:
        """`max_growth`: of each API process: what one of them keeps for the next request, each does."""
        assert self.server.process.poll() is None
        assert self._http.get("/health").status_code == 200
        assert self._canary() == self.canary
        errors = sum_of(settled(self._http), "http_requests_total", 'status="5xx"')
        assert errors - self.server_errors <= server_errors
        self.server_errors = errors
        assert set(self.server.children()) == self.children
        assert self.growth() < max_growth * (1 + len(self.server.guests()))

    def growth(self) -> int:
        """Bytes of resident memory."""
        return self._memory() - self.memory

    def metric(self, name: str, label: str = "") -> float:
        """The sum over all series that have this label."""
        return sum_of(self._http.get("/metrics").text, name, label)

    def _canary(self) -> list[int]:
        response = self._http.post("/v1/completions", json=CANARY)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def _memory(self) -> int:
        pids = (self.server.process.pid, *self.children)
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)


def settled(http: httpx.Client) -> str:
    """The metrics, once nothing runs and every block is back."""
    deadline = time.monotonic() + PATIENCE
    while True:
        page = http.get("/metrics").text
        busy = sum_of(page, "vllm:num_requests_running") + sum_of(page, "vllm:num_requests_waiting")
        if not busy and sum_of(page, "vllm:kv_blocks") == sum_of(page, "vllm:kv_blocks_free") > 0:
            return page
        assert time.monotonic() < deadline, "requests or blocks were not given back"
        time.sleep(0.05)


def is_at_rest(server: Any) -> None:
    """As much of the invariants as holds of a server that has another engine than before."""
    assert server.process.poll() is None and len(server.engine_pids()) == 1
    with httpx.Client(base_url=server.url, timeout=240) as http:
        assert http.get("/health").status_code == 200
        settled(http)


def sum_of(page: str, name: str, label: str = "") -> float:
    lines = (line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")) and label in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def longest_answer(url: str, attack: Callable[[], Any]) -> float:
    """Seconds of the slowest GET /livez, asked every 10 ms on one connection while `attack` runs: so long the event
    loop was held, or the machine."""
    over, longest = threading.Event(), 0.0

    def ask() -> None:
        nonlocal longest
        with connect(url) as sock:
            while not over.wait(0.01):
                begun = time.monotonic()
                sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
                assert read_answer(sock)[0] == 200
                longest = max(longest, time.monotonic() - begun)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        attack()
    finally:
        over.set()
        asking.join()
    return longest


def at_once(num: int, attack: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=attack) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
