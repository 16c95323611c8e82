"""One HTTP/1.1 connection: uvicorn's, with limits on what a client may send, and on how long it may take."""

from __future__ import annotations

import contextlib
import socket
import uuid
from asyncio import BaseTransport, Transport
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ..options.http import HttpConfig
from .cycle import Cycle, Ending, LastCycle
from .framing import body_length
from .refusal import Refusal, malformed
from .timer import Timer

MAX_PIPELINE = 16  # requests that may wait behind the one that is answered
MAX_IGNORED = 1 << 20  # bytes of a body that nobody wants, and that are read all the same to keep the connection
LINGER = 2.0  # seconds of silence in which a refused client can read why
RESERVED_FILES = 64  # open files that are no connections, or those of clients that linger, beyond the limit


class Phase(Enum):
    IDLE = "no request has begun"
    HEAD = "its head is arriving"
    BODY = "its body is arriving"


class HttpProtocol(HttpToolsProtocol):
    # uvicorn makes the protocols and passes only its own things: what they share sits on a class made for each server.
    limits: HttpConfig
    max_connections: int
    refused: Callable[[str], None]
    # Connections that wait for their client, the longest first: for a first request, for another one, for its rest.
    lingering: dict[HttpProtocol, None]  # refused, or answered early: they may still read why
    newcomers: dict[HttpProtocol, None]
    kept: dict[HttpProtocol, None]
    arriving: dict[HttpProtocol, None]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._phase = Phase.IDLE
        self._head_size = 0  # of the headers that are complete
        self._head_received = 0  # since the head began, but for what came with its first bytes
        self._unread: int | None = None  # bytes of the body to come; None: chunked, nobody knows
        self._refusal: Refusal | None = None  # why a callback stopped the parser
        self._offered = False  # an upgrade, in the head that was read last
        self._ignores = False  # what comes after a refusal, or after an early answer
        self._talks = False  # bytes came since the lingering was last looked at
        self._linger_until = 0.0  # of the loop's clock
        self._is_last = False  # the answer that is over ends the connection, of which a body still arrives
        self._running: RequestResponseCycle | None = None  # what is being answered; uvicorn's `cycle` is the newest
        self._reading: Timer | None = None
        self._writing: Timer | None = None
        self._lingering: Timer | None = None

    # ---- the connection ----

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(cast(Transport, transport))
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # the kernel sees earlier than the buffers here that nobody reads
                milliseconds = int(1000 * self.limits.write_timeout)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self.newcomers[self] = None
        self._expect(self.limits.header_timeout)
        if len(self.connections) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Who lingers goes first, then who has not asked for anything yet, then who has been answered; uploads only
        after them. Those who were refused for want of room take no place, and give none: a few files are for them."""
        excess = len(self.connections) - self.max_connections
        if (has_room := excess <= len(self.lingering)) or (excess > RESERVED_FILES // 2 and self.lingering):
            gone = next(iter(self.lingering))
            gone._is_busy()
            self.connections.discard(gone)  # at once: the next newcomer may come before it is lost
            gone.transport.abort()
        others = (one for one in (*self.newcomers, *self.kept, *self.arriving) if one is not self)
        if has_room:
            self.refused("evicted_connection")
        elif (longest := next(others, None)) is None:
            self._refuse(Refusal(503, "too_many_connections", "Too many connections.", **{"retry-after": "1"}))
        else:
            self.refused("evicted_connection")
            longest._end()

    def _is_busy(self) -> None:
        self.lingering.pop(self, None)
        self.newcomers.pop(self, None)
        self.kept.pop(self, None)
        self.arriving.pop(self, None)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has closed its side, and may have left. What needs no computing can still be answered, where the
        request is whole, and the connection not one of TLS."""
        running = self._running
        if not isinstance(running, Cycle) or running.response_complete or self.pipeline or self._ignores:
            return None
        if self._phase is not Phase.IDLE or not self.transport.can_write_eof():
            return None
        running.keep_alive = False
        running.left = True
        running.message_event.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_busy()
        self._expect(None)
        self._expect_reader(None)
        if self._lingering is not None:
            self._lingering.cancel()
        if isinstance(exc, TimeoutError):
            self.refused("stalled_reader")
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores:
            self._talks = True
            return
        self._unset_keepalive_if_required()
        in_head = self._phase is Phase.HEAD
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or malformed(str(error).rstrip(".") or "it cannot be read"))
            return
        if in_head and self._phase is Phase.HEAD:
            self._head_received += len(data)
            if self._head_received > self.limits.max_header_size + self.limits.max_request_line:
                self._refuse(self._headers_too_large())
        elif self._phase is Phase.IDLE and self._reading is None and self._answered():
            self._expect(self.limits.header_timeout)  # empty lines, which are no request yet

    def _parse(self, data: bytes) -> None:
        """Offers to go on in another protocol are not taken up (RFC 9110, section 7.8): clients of Java offer h2c with
        each request. The parser ends a request that has one with its head, so a new parser gets that head without the
        offer, and then all that comes behind it. Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offered:
                    return  # CONNECT: answered as any other request, after which the connection is closed
                rest = memoryview(data)[upgrade.args[0] :]
            kept = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            version = self.parser.get_http_version().encode()
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(kept))
            self._offered = False
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            data = head + rest

    # ---- the request, as the parser reads it ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase, self._head_size, self._head_received, self._unread = Phase.HEAD, 0, 0, 0
        if self._answered():
            self._is_busy()
            self.arriving[self] = None
        self._expect(self.limits.header_timeout)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_request_line:
            limit = self.limits.max_request_line
            self._stop(Refusal(414, "uri_too_long", f"The request's URL is longer than {limit} bytes."))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_size += len(name) + len(value) + 4
        if len(self.headers) > self.limits.max_header_count or self._head_size > self.limits.max_header_size:
            self._stop(self._headers_too_large())

    def on_headers_complete(self) -> None:
        try:
            self._unread = body_length(self.parser.get_http_version(), self.headers)
        except Refusal as refusal:
            self._stop(refusal)
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offered = True
            return
        if len(self.pipeline) >= MAX_PIPELINE:
            self._stop(malformed(f"more than {MAX_PIPELINE} requests wait on one connection"))
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        self._phase = Phase.BODY
        self._expect(self.limits.body_timeout)
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        self.cycle.transport = cast(Transport, Ending(self.transport, self._close))
        if not self.cycle.keep_alive:
            self.cycle.__class__ = LastCycle  # its task has not begun

    def on_body(self, body: bytes) -> None:
        if self._unread is not None:
            self._unread -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered:
            return
        self._phase = Phase.IDLE
        self._expect(None)
        self._is_busy()
        super().on_message_complete()
        if self._answered() and not self.transport.is_closing():
            self._keep_alive()

    # ---- the answer ----

    def on_response_complete(self) -> None:
        if self._is_last:
            self.server_state.total_requests += 1
            self._linger()
            return
        if self.transport.get_write_buffer_size():
            self._expect_reader(self.limits.write_timeout)
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._running = following
        if self.transport.is_closing() or not self._answered():
            return
        if self._ignores:
            if self._phase is not Phase.BODY and self._refusal is not None:
                self._say(self._refusal)
            else:
                self._linger()
        elif self._phase is Phase.BODY:  # answered before it was read
            self._unset_keepalive_if_required()
            if self._unread is None or self._unread > MAX_IGNORED:
                self._linger()
        elif self._phase is Phase.HEAD:
            self.arriving[self] = None
        else:
            self.kept[self] = None

    def _keep_alive(self) -> None:
        self.kept[self] = None
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.limits.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader(self.limits.write_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect_reader(None)

    # ---- time ----

    def _expect(self, seconds: float | None) -> None:
        """Something has to arrive within this time."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if seconds is None else Timer(self.loop, seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._phase is not Phase.BODY and not self._answered()):
            self._expect(self.limits.body_timeout)  # it waits for us
        elif self._phase is Phase.IDLE:
            self._end()
        else:
            part = "head" if self._phase is Phase.HEAD else "body"
            self._refuse(Refusal(408, "slow_request", f"The request's {part} did not arrive in time."))

    def _expect_reader(self, seconds: float | None) -> None:
        """The client has to read within this time."""
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None if seconds is None else Timer(self.loop, seconds, self._stalled)

    def _stalled(self) -> None:
        self._writing = None
        if self.flow.write_paused or (self.transport.get_write_buffer_size() and self._answered()):
            self.refused("stalled_reader")
            self.transport.abort()

    # ---- the end ----

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _headers_too_large(self) -> Refusal:
        size, count = self.limits.max_header_size, self.limits.max_header_count
        return Refusal(431, "headers_too_large", f"The headers exceed {size} bytes or {count} lines.")

    def _stop(self, refusal: Refusal) -> None:
        """From a callback of the parser."""
        self._refusal = refusal
        raise refusal

    def _refuse(self, refusal: Refusal) -> None:
        self.refused(refusal.code)
        self._ignores = True
        self._expect(None)
        if self._phase is Phase.BODY and self.pipeline:
            # Never begin what will never be whole; what was whole before it is answered.
            self.pipeline.popleft()
            assert self._running is not None
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
            self._phase = Phase.IDLE
        if self._answered():
            self._say(refusal)
        elif self._phase is Phase.BODY and not self.pipeline and not self.cycle.response_started:
            self.cycle.disconnected = True  # the application hears that the client has left
            self.cycle.message_event.set()
            self._say(refusal)
        else:
            self._refusal = refusal  # an answer is under way: another must not get into it

    def _say(self, refusal: Refusal) -> None:
        body = refusal.error.body()
        headers = {
            "content-type": "application/json", "content-length": str(len(body)), "connection": "close",
            "x-request-id": uuid.uuid4().hex, **refusal.error.headers,
        }  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[refusal.error.status] + head.encode() + b"\r\n" + body)
        self._linger()

    def _close(self) -> None:
        """A cycle is over that does not keep the connection."""
        self._is_last = self._phase is Phase.BODY and self._answered() and not self.transport.is_closing()
        if not self._is_last:
            self._end()

    def _end(self) -> None:
        """What was written may still leave."""
        self._is_busy()
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._end()

    def _linger(self) -> None:
        """Closes, but lets the client read first: a reset, which unread data causes, would destroy the answer."""
        self._ignores = True
        self._is_busy()
        self._expect(None)
        self._expect_reader(None)
        self._unset_keepalive_if_required()
        if not self.transport.can_write_eof():  # TLS
            self._end()
            return
        self.lingering[self] = None
        self.transport.write_eof()
        self.flow.resume_reading()
        if self._lingering is not None:
            self._lingering.cancel()
        self._linger_until = self.loop.time() + self.limits.body_timeout
        self._lingering = Timer(self.loop, LINGER, self._linger_on)

    def _linger_on(self) -> None:
        """As long as the client sends, for no longer than it may send anyway, and as long as it has not read all."""
        late = self.loop.time() >= self._linger_until
        if late or not (self._talks or self.transport.get_write_buffer_size()):
            self.transport.abort()
            return
        self._talks = False
        self._lingering = Timer(self.loop, LINGER, self._linger_on)
