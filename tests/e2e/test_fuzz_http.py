"""Valid requests, mutilated: whatever arrives, each connection ends, each answer is whole HTTP, and none of them is the
server's fault.

VSERVE_FUZZ_SECONDS=600 makes it ten minutes of fresh inputs; without, it is always the same thousand.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

SECONDS = float(os.environ.get("VSERVE_FUZZ_SECONDS", "0"))
NUM_INPUTS = 1200
CONNECTIONS = 40  # at once
PATIENCE = 60.0  # seconds for a connection to end
# 429: so many choices that they would not fit the queue.
EXPECTED = {200, 400, 404, 405, 408, 413, 414, 415, 429, 431}

CHAT = {
    "model": "demo", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}, "top_p": 0.9, "n": 1,
    "messages": [{"role": "system", "content": "Be é."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
}  # fmt: skip
COMPLETION = {
    "model": "demo", "prompt": ["Hi", "Ho"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True},
    "logprobs": 1, "seed": 1, "echo": False, "stop_token_ids": [7], "structured_outputs": {"choice": ["a", "b"]},
}  # fmt: skip
IDS = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 1, "cache_salt": "s", "request_id": "r", "min_tokens": 0}
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/chat/completions/render")


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def post(path: str, body: bytes, *lines: str) -> bytes:
    return head("POST", path, "content-type: application/json", f"content-length: {len(body)}", *lines) + body


def chunked(path: str, body: bytes) -> bytes:
    parts = [body[i : i + 40] for i in range(0, len(body), 40)]
    data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    return head("POST", path, "content-type: application/json", "transfer-encoding: chunked") + data


BODIES = [(PATHS[0], json.dumps(CHAT).encode()), (PATHS[1], json.dumps(COMPLETION).encode()),
          (PATHS[1], json.dumps(IDS).encode()), (PATHS[2], b'{"model": "demo", "prompt": "Hi"}'),
          (PATHS[3], b'{"model": "demo", "tokens": [5, 6]}'), (PATHS[4], json.dumps(CHAT).encode())]  # fmt: skip
LAST = head("GET", "/v1/models", "connection: close")
REQUESTS = [
    *(post(path, body, "x-request-id: a") for path, body in BODIES),
    *(chunked(path, body) for path, body in BODIES[:3]),
    head("GET", "/health"), head("GET", "/v1/models/demo", "accept: */*"),
    head("OPTIONS", "/v1/completions", "origin: y"),
    head("GET", "/metrics") + head("GET", "/version"), head("HEAD", "/health"), head("DELETE", "/v1/models"),
    head("GET", "/load", "connection: keep-alive", "authorization: Bearer k", "traceparent: 00-1-2-01"),
]  # fmt: skip

PIECES = [
    b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b",", b"\r\n\r\n", b"\xff", b"\xc3", b"%00", b"%2e%2e/", b"//",
    b"?a=b",
    b"content-length: 5\r\n", b"content-length: 99999999\r\n", b"transfer-encoding: chunked\r\n", b"host: y\r\n",
    b"expect: 100-continue\r\n", b"connection: close\r\n", b"upgrade: websocket\r\nconnection: upgrade\r\n",
    b"content-encoding: gzip\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"HTTP/1.0", b"HTTP/2.0", b"a" * 9000,
    b"x: y\r\n" * 120,
]  # fmt: skip
VALUES = [
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"9223372036854775808", b"1.5", b'""', b'"x"', b"[]", b"{}",
    b"[[1]]",    b'"\\ud800"', b'"\\u0000"', b'"<|im_end|>"', b"[null]", b'{"a": {"b": [1]}}', b"[" * 200 + b"]" * 200,
    b'"' + b"y" * 3000 + b'"',
]  # fmt: skip


class Mutator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def input(self) -> list[bytes]:
        """What is sent, in so many pieces."""
        data = b"".join(self._request() for _ in range(self.random.choice((1, 1, 1, 2, 4)))) + LAST
        cuts = sorted(self.random.randrange(len(data) + 1) for _ in range(self.random.choice((0, 0, 1, 3))))
        return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def _request(self) -> bytes:
        if self.random.random() < 0.4:  # what is in the body, of the right length
            path, body = self.random.choice(BODIES)
            for _ in range(self.random.choice((1, 1, 2, 4))):
                body = self._spoil_json(body) if self.random.random() < 0.8 else self._spoil(body)
            return post(self.random.choice((path, path, self.random.choice(PATHS))), body)
        data = self.random.choice(REQUESTS)
        for _ in range(self.random.choice((0, 1, 1, 2, 5))):
            data = self._spoil(data)
        return data

    def _spoil_json(self, body: bytes) -> bytes:
        values = list(re.finditer(rb'"[^"]*"(?!:)|-?\d+(\.\d+)?|true|false|\[[^\[\]]*\]|\{[^{}]*\}', body))
        if not values:
            return body
        value = self.random.choice(values)
        return body[: value.start()] + self.random.choice(VALUES) + body[value.end() :]

    def _spoil(self, data: bytes) -> bytes:
        i, j = sorted(self.random.randrange(len(data) + 1) for _ in range(2))
        j = min(j, i + self.random.choice((1, 4, 30, 400)))
        kind = self.random.randrange(7)
        if kind == 0:
            return data[:i] + data[j:]
        if kind == 1:
            return data[:j] + data[i:j] * self.random.choice((1, 3, 50)) + data[j:]
        if kind == 2:
            return data[:i] + self.random.choice(PIECES) + data[i:]
        if kind == 3:
            return data[:i] + self.random.randbytes(j - i) + data[j:]
        if kind == 4:
            return data[:i] + self.random.choice(PIECES) + data[j:]
        if kind == 5:  # a line in another place
            lines = data.split(b"\r\n")
            lines.insert(self.random.randrange(len(lines) + 1), lines.pop(self.random.randrange(len(lines))))
            return b"\r\n".join(lines)
        return data[:j] if self.random.random() < 0.2 else data.swapcase()


def answers(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Status and body of each; raises AssertionError where it is no HTTP."""
    while data:
        match = re.match(rb"HTTP/1\.1 (\d{3}) [A-Za-z \-']+\r\n((?:[a-z0-9-]+: [^\r\n\0]*\r\n)*)\r\n", data)
        assert match, f"no answer: {data[:300]!r}"
        status, lines, data = int(match[1]), match[2], data[match.end() :]
        headers = dict(line.split(b": ", 1) for line in lines.splitlines())
        if status == 100:
            continue
        assert b"x-request-id" in headers, headers
        if b"transfer-encoding" in headers:
            body = b""
            while not data.startswith(b"0\r\n\r\n"):
                size = re.match(rb"([0-9a-f]+)\r\n", data)
                if size is None:
                    assert len(data) < 20 or not data, f"no chunk: {data[:300]!r}"
                    return  # cut off: the client did something that ended the connection
                length = int(size[1], 16)
                body, data = body + data[size.end() : size.end() + length], data[size.end() + length + 2 :]
            data = data[5:]
        else:
            length = int(headers[b"content-length"])
            if data.startswith(b"HTTP/1.1 "):  # an answer to HEAD tells the length of what it has not
                length = 0
            body, data = data[:length], data[length:]
            assert len(body) in (0, length), "half an answer"
        yield status, body


class Fuzzer:
    def __init__(self, url: str, seed: int) -> None:
        self.mutator = Mutator(seed)
        self.statuses: Counter[int] = Counter()
        self.num_inputs = 0
        self.findings: list[str] = []
        address = urlsplit(url)
        self._address = (address.hostname, address.port)

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds

        async def keep_sending() -> None:
            while (time.monotonic() < end) if seconds else (self.num_inputs < NUM_INPUTS):
                self.num_inputs += 1
                await self.send(self.mutator.input())

        await asyncio.gather(*(keep_sending() for _ in range(CONNECTIONS)))

    async def send(self, pieces: list[bytes]) -> None:
        data = b""
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection(*self._address)
                try:
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0.002 if len(pieces) > 1 else 0)
                    while chunk := await reader.read(1 << 16):
                        data += chunk
                except ConnectionError:
                    pass  # it has closed before it had read everything, which it may
                finally:
                    writer.close()
            for status, body in answers(data):
                self.statuses[status] += 1
                assert status in EXPECTED, f"{status} {body[:300]!r}"
                if status != 200 and body:
                    error = json.loads(body)["error"]
                    assert set(error) == {"message", "type", "param", "code"}, error
                    assert "Traceback" not in error["message"] and ".py" not in error["message"], error
        except (AssertionError, TimeoutError, ValueError, KeyError) as problem:
            self.findings.append(f"{type(problem).__name__}: {problem}\nafter {b''.join(pieces)!r}")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_mutilated_requests(serve, attacks):
    seed = int(time.time()) if SECONDS else 6
    with serve(
        "--header-timeout", "1", "--body-timeout", "1", "--timeout-keep-alive", "1", "--max-body-size", "100000",
        "--served-model-name", "demo", "--disable-access-log-for-endpoints", ",".join(PATHS),
    ) as server:  # fmt: skip
        compiled = {"model": "demo", "prompt": "Hi", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}}
        attacks.exchange(server.url, attacks.post(json.dumps(compiled).encode(), "connection: close"))
        before = attacks.Invariants(server)
        fuzzer = Fuzzer(server.url, seed)
        asyncio.run(fuzzer.run(SECONDS))
        print(f"\nseed {seed}: {fuzzer.num_inputs} inputs, statuses {dict(sorted(fuzzer.statuses.items()))}")
        assert not fuzzer.findings, f"{len(fuzzer.findings)} findings\n" + "\n\n".join(fuzzer.findings[:5])
        # Some were mutilated so little that they were answered, and most kinds of refusal have occurred.
        assert fuzzer.statuses[200] > 100 and fuzzer.statuses[400] > 100 and len(fuzzer.statuses) >= 7
        before.check()
    log = "".join(server.stderr)
    assert "Traceback" not in log and '"level":"error"' not in log, log[-3000:]
