"""Bodies that come and do not end, that hold much in few bytes, or go on from much that is stored."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
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


# ---- what holds the event loop ----

HOLD = 0.050  # seconds, or three times what the machine alone takes
EMPTY = {"role": "user", "content": ""}
TOOLS = [
    {"type": "function", "name": f"f{i}", "parameters": {"type": "object", "x": [{}] * 1000}} for i in range(60)
]  # fmt: skip
# Below 256 KB each: name → (path, body, status)
DENSE: dict[str, tuple[str, dict[str, Any], int]] = {
    "messages": ("/v1/chat/completions", {"messages": [EMPTY] * 7000}, 400),
    "items": ("/v1/responses", {"input": [EMPTY] * 7000}, 400),
    "fields": ("/v1/completions", {**BODY, **{f"k{i}": 1 for i in range(20_000)}}, 200),
    "texts": ("/score", {"text_1": "a", "text_2": ["b"] * 1000}, 200),
    "tools": ("/v1/responses", {"input": "Hi", "tools": TOOLS, "tool_choice": "none", "max_output_tokens": 1}, 200),
}


@pytest.fixture
def holds_nobody(
    guarded_server: Any, attacks: Any, settles_within: Callable[[float, Callable[[], float]], bool]
) -> Callable[[Callable[[], Any]], bool]:
    """Whether, more often than not, no probe waits longer than HOLD while something is done."""

    def does(attack: Callable[[], Any]) -> bool:
        def measure() -> float:
            alone = attacks.longest_answer(guarded_server.url, lambda: time.sleep(0.3))
            return attacks.longest_answer(guarded_server.url, attack) / max(HOLD, 3 * alone)

        return settles_within(1.0, measure)

    return does


@pytest.mark.alone
@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("kind", DENSE)
def test_small_bodies_of_many_values(guarded_server: Any, attacks: Any, holds_nobody: Any, kind: str) -> None:
    path, body, status = DENSE[kind]
    raw = json.dumps(body).encode()
    assert len(raw) < 256 << 10
    request = attacks.post(raw, "connection: close", path=path)

    def attack() -> None:
        ((found, error),) = attacks.exchange(guarded_server.url, request)
        assert found == status, error

    assert holds_nobody(attack)


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["messages", "thoughts"])
def test_small_requests_that_go_on_from_much(
    guarded_server: Any, before: Any, attacks: Any, holds_nobody: Any, kind: str
) -> None:
    """Each of them decoded all of it on the event loop, and rendered it a dozen times."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 900_000}]}
    turn = [EMPTY] * 5000 if kind == "messages" else [thought, {"role": "user", "content": "Hello!"}]
    body = {"input": turn, "truncation": "auto", "max_output_tokens": 1}
    with httpx.Client(base_url=guarded_server.url, timeout=240) as http:
        for _ in range(3):
            answer = http.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            body["previous_response_id"] = answer.json()["id"]
    raw = json.dumps({**body, "input": "Hi", "store": False}).encode()
    request = attacks.post(raw, "connection: close", path="/v1/responses")
    assert len(raw) < 200

    def attack() -> None:
        ((found, error),) = attacks.exchange(guarded_server.url, request)
        assert found == 200, error

    assert holds_nobody(lambda: attacks.at_once(4, attack))
    before.check(max_growth=3 * attacks.MAX_GROWTH)  # what is stored, and threads that keep what they once needed
