"""Bodies that come and do not end: each is small enough, and all of them together are bounded."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

MOST = 256 << 20  # bytes, as server/http/body_limit.py has it
KEPT = 64 << 20  # bytes of buffers, and of what allocators keep
BODY = {"model": "demo", "prompt": "Hello", "max_tokens": 1}


def complete(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
    assert answer.status_code == 200, answer.text


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_large_bodies_that_never_end_have_a_bound_together(
    serve: Any, api_servers: tuple[str, ...], attacks: Any, until: Any
) -> None:
    """Each stays below the limit of one, and its client holds the last byte back: 256 MiB of them are kept, no more."""
    size = (8 << 20) - 1
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    ).encode()
    piece, held = b" " * (size - 1), []

    def is_refused(sock: socket.socket) -> bool:
        """Now; False: it waits for the last byte."""
        try:
            status, headers, body = attacks.read_answer(sock)
        except TimeoutError:
            return False
        except OSError:  # it has been told, and was reset since
            return True
        assert status == 429 and b"too_many_bodies" in body and headers["retry-after"] == "1"
        sock.close()
        return True

    with serve(*api_servers, "--served-model-name", "demo") as server:
        complete(server.url)
        before = resident(server.process.pid)
        try:
            for _ in range(40):
                sock = attacks.connect(server.url)
                held.append(sock)
                sock.settimeout(20)
                sock.sendall(head)
                try:
                    sock.sendall(piece)
                    sock.settimeout(0.05)
                    if is_refused(sock):
                        held.remove(sock)
                except TimeoutError:  # it does not read on
                    sock.settimeout(0.05)
                except OSError:  # the refusal did not wait for the rest
                    held.remove(sock)
            deadline = time.monotonic() + 60
            while len(held) > MOST // size + 1:  # who is one too many may be told while another one is looked at
                assert time.monotonic() < deadline, len(held)
                held = [sock for sock in held if not is_refused(sock)]
            complete(server.url)
            assert resident(server.process.pid) - before < MOST + KEPT
        finally:
            for sock in held:
                sock.close()
        big = BODY | {"ignored": "x" * (1 << 20)}
        until(
            lambda: httpx.post(f"{server.url}/v1/completions", json=big).status_code == 200, 60
        )  # there is room again
