"""A streamed HTTP answer, one time stamp a message. The client must never be the bottleneck, so bytes are parsed here
as they arrive: no HTTP library, no task and no await a token."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from typing import Any, cast

import msgspec

TOO_BUSY = (429, 503)
_WAITS = {"retry-after": 1.0, "retry-after-ms": 0.001}  # header → seconds


class StreamResult(msgspec.Struct):
    """What one request brought. Times are time.monotonic(), one clock for all processes of a host."""

    index: int
    start: float = 0.0  # before a connection is opened for it
    stamps: list[float] = []  # of every SSE message with choices
    end: float = 0.0  # the last byte of the answer
    prompt_tokens: int | None = None  # as the server counted
    completion_tokens: int | None = None
    error: str | None = None
    retry_after: float | None = None  # seconds, where the server was too busy and said when to come back
    num_retries: int = 0

    @property
    def output_tokens(self) -> int:
        """As the server counted; a server that sends no usage is taken to send a token a message."""
        return len(self.stamps) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.start

    @property
    def latency(self) -> float:
        return self.stamps[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is no second one."""
        return (self.stamps[-1] - self.stamps[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """The fields of a stream's message that are counted; the rest is skipped, not decoded."""

    choices: list[msgspec.Raw] | None = None
    usage: Usage | None = None
    error: Any = None


class StaleConnection(Exception):
    """A kept connection was closed by the server before it answered: try again on a new one."""


class EventStream(asyncio.Protocol):
    """One HTTP/1.1 connection; one streamed request at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self._decoder = msgspec.json.Decoder(Chunk)
        self._transport: asyncio.Transport
        self._result: StreamResult | None = None
        self._waiter: asyncio.Future[None]
        self._buffer = b""  # of the connection: an incomplete head or chunk
        self._line = b""  # of the body: an incomplete line
        self._failure = b""  # body of an answer that is no stream
        self._status = 0  # 0 = the head is not complete
        self._left: int | None = None  # bytes of a body with a content-length
        self._chunked = False
        self._done = False  # [DONE] has come
        self._retry_after: dict[str, float] = {}  # headers, seconds

    async def send(self, request: bytes, result: StreamResult) -> None:
        """Fills `result` until the answer is complete; whatever goes wrong is its `error`. Raises StaleConnection."""
        self._result = result
        self._buffer = self._line = self._failure = b""
        self._status, self._left, self._chunked, self._done = 0, None, False, False
        self._retry_after = {}
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._result = None

    def close(self) -> None:
        self.reusable = False
        self._transport.abort()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._result is None or self._waiter.done():
            self.close()  # an answer that nobody asked for
            return
        try:
            self._parse(self._buffer + data if self._buffer else data, now)
        except (ValueError, IndexError, msgspec.MsgspecError) as error:
            self._finish(now, f"cannot read the answer: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._result is None or self._waiter.done():
            return
        if not self._status and not self._buffer:
            self._waiter.set_exception(StaleConnection("the server closed the connection without an answer"))
        elif self._status and self._left is None and not self._chunked:
            self._finish(time.monotonic())  # a body that ends with the connection
        else:
            self._finish(time.monotonic(), "the connection was lost in the middle of the answer")

    # ---- HTTP ----

    def _parse(self, buffer: bytes, now: float) -> None:
        position = 0
        if not self._status:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = buffer
                return
            self._read_head(buffer[:end])
            position = end + 4
        if self._chunked:
            self._read_chunks(buffer, position, now)
            return
        body = buffer[position:]
        self._buffer = b""
        if self._left is not None:
            self._left -= len(body)
        self._read_body(body, now)
        if self._left is not None and self._left <= 0:
            self._finish(now)

    def _read_head(self, head: bytes) -> None:
        status, *lines = head.decode("latin-1").split("\r\n")
        self._status = int(status.split(" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(":")
            name, value = name.lower(), value.strip().lower()
            if name == "transfer-encoding":
                self._chunked = value == "chunked"
            elif name == "content-length":
                self._left = int(value)
            elif name == "connection" and value == "close":
                self.reusable = False
            elif (unit := _WAITS.get(name)) is not None and re.fullmatch(r"\d+(\.\d+)?", value):  # or a date
                self._retry_after[name] = float(value) * unit

    def _read_chunks(self, buffer: bytes, position: int, now: float) -> None:
        """RFC 9112, section 7.1: size in hexadecimal, CRLF, data, CRLF; size 0 ends the body."""
        while (line_end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:line_end].partition(b";")[0], 16)
            start = line_end + 2
            if size == 0:
                if not buffer.startswith(b"\r\n", start) and buffer.find(b"\r\n\r\n", start) < 0:
                    break  # trailers are incomplete
                self._finish(now)
                return
            if len(buffer) < start + size + 2:
                break
            self._read_body(buffer[start : start + size], now)
            position = start + size + 2
        self._buffer = buffer[position:]

    def _read_body(self, body: bytes, now: float) -> None:
        if self._status != 200:
            self._failure += body
            return
        lines = (self._line + body if self._line else body).split(b"\n")
        self._line = lines.pop()
        for line in lines:
            # No server of this API spreads a message over several data lines.
            if line.startswith(b"data:"):
                self._read_message(line[5:].strip(), now)

    def _read_message(self, data: bytes, now: float) -> None:
        assert self._result is not None
        if data == b"[DONE]":
            self._done = True
            return
        chunk = self._decoder.decode(data)
        if chunk.choices:
            self._result.stamps.append(now)
        if chunk.usage is not None:
            self._result.prompt_tokens = chunk.usage.prompt_tokens
            self._result.completion_tokens = chunk.usage.completion_tokens
        if chunk.error is not None:
            self._result.error = error_message(data)

    def _finish(self, now: float, error: str | None = None) -> None:
        assert self._result is not None
        result = self._result
        result.end = now
        if error is not None:
            self.close()
        elif self._status != 200:
            error = f"HTTP {self._status}: {error_message(self._failure)}"
            if self._status in TOO_BUSY:
                result.retry_after = min(self._retry_after.values(), default=None)
        elif not result.stamps:
            error = "the answer has no message with choices"
        elif not self._done:
            error = "the stream ended without [DONE]"
        result.error = result.error or error
        if not self._waiter.done():
            self._waiter.set_result(None)


def error_message(body: bytes) -> str:
    """The message of an error body in OpenAI's shape, or the body's beginning."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "(no body)"


class ConnectionPool:
    """Connections to one server, kept for the next request."""

    def __init__(self, host: str, port: int, tls: bool) -> None:
        self._host = host
        self._port = port
        self._ssl = ssl.create_default_context() if tls else None
        self._idle: list[EventStream] = []

    async def stream(self, request: bytes, result: StreamResult) -> None:
        """Sends a request and fills `result`. Never raises for what the network or the server did."""
        result.start = result.start or time.monotonic()
        try:
            while True:
                while self._idle and not self._idle[-1].reusable:
                    self._idle.pop()
                kept = bool(self._idle)
                connection = self._idle.pop() if kept else await self._connect()
                try:
                    await connection.send(request, result)
                    break
                except StaleConnection:
                    if not kept:
                        raise
        except (OSError, StaleConnection) as error:
            result.end = time.monotonic()
            result.error = str(error) or type(error).__name__
            return
        if connection.reusable:
            self._idle.append(connection)

    async def _connect(self) -> EventStream:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(EventStream, self._host, self._port, ssl=self._ssl)
        return connection

    async def insist(self, request: bytes, result: StreamResult, patience: float) -> None:
        """The same, and again when a server that is too busy says so, for at most so many seconds. What it waits counts
        as waiting for the first token: `result.start` stays."""
        deadline = time.monotonic() + patience
        await self.stream(request, result)
        while result.retry_after is not None and time.monotonic() + result.retry_after < deadline:
            await asyncio.sleep(result.retry_after)
            result.error = result.retry_after = None
            result.num_retries += 1
            await self.stream(request, result)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
