"""The connection's own clocks, over Unix sockets, where the kernel has none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from vserve.server.http import protocol as http_protocol
from vserve.server.http.timer import Timer
from vserve.server.http.uvicorn_options import uvicorn_options
from vserve.server.options.config import ServerConfig

HUGE = b"x" * (8 << 20)


async def application(scope: Any, receive: Any, send: Any) -> None:
    length = (b"content-length", b"%d" % len(HUGE)) if scope["path"] == "/huge" else (b"content-length", b"2")
    if scope["path"] == "/echo":
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            scope["app_left"].append(True)
            return
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    if scope["path"] == "/huge":
        for _ in range(8):
            await send({"type": "http.response.body", "body": HUGE[: 1 << 20], "more_body": True})
        await send({"type": "http.response.body"})
    else:
        await send({"type": "http.response.body", "body": b"ok"})


def run(tmp_path: Path, test: Any, app: Any = application, **options: Any) -> Counter[str]:
    """Runs `await test(path)` against a server on a Unix socket; returns what it refused."""
    refused: Counter[str] = Counter()
    path = tmp_path / "socket"

    async def main() -> None:
        config = ServerConfig(**options)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        settings = uvicorn_options(config, lambda reason: refused.update([reason]))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off", **settings))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(test(str(path)), 60)
        finally:
            server.should_exit = server.force_exit = True
            await serving

    uvloop.run(main())  # as a server does
    return refused


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def test_row_30_a_client_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.write(get("/huge"))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1.5)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await reader.read()) < len(HUGE)

    assert run(tmp_path, test, write_timeout=0.5)["stalled_reader"] == 1


def test_row_30_a_slow_client_gets_everything(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 16)
        writer.write(get("/huge"))
        size = 0
        while size < len(HUGE):
            size += len(await reader.read(1 << 17))
            await asyncio.sleep(0.01)
        writer.close()

    assert not run(tmp_path, test, write_timeout=20.0)


def test_row_30_an_answer_is_not_kept_for_who_never_fetches_it(tmp_path: Path) -> None:
    """The application is done; only bytes are left."""

    async def small(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(HUGE))]})
        await send({"type": "http.response.body", "body": HUGE})

    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.write(get("/").replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1.5)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await reader.read()) < len(HUGE)

    assert run(tmp_path, test, small, write_timeout=0.5)["stalled_reader"] == 1


def test_an_idle_connection_is_kept_and_then_closed(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        for pause in (0.0, 0.3, 0.3):
            await asyncio.sleep(pause)
            writer.write(get("/"))
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""

    assert not run(tmp_path, test, timeout_keep_alive=4.0, header_timeout=0.5)


@pytest.mark.parametrize("head_first", [False, True])
def test_who_was_in_time_is_not_late_because_the_server_was(tmp_path: Path, head_first: bool) -> None:
    """What somebody else has sent holds the event loop for longer than the limit, and meanwhile this one sends."""
    head, body = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n", b"rest"

    async def test(path: str) -> None:
        loop = asyncio.get_running_loop()
        reads, writes = socket.socketpair()
        with reads, writes, socket.socket(socket.AF_UNIX) as sock:

            def hold() -> None:
                loop.remove_reader(reads)
                sock.sendall(body if head_first else head + body)
                time.sleep(0.8)

            sock.connect(path)
            if head_first:
                sock.sendall(head)
            await asyncio.sleep(0.1)
            loop.add_reader(reads, hold)
            writes.sendall(b"x")
            sock.setblocking(False)
            assert b"200 OK" in await loop.sock_recv(sock, 1 << 16)

    assert not run(tmp_path, test, header_timeout=0.5, body_timeout=0.5)


def test_a_clock_goes_on_where_the_event_loop_is_always_late() -> None:
    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        begun = time.monotonic()
        Timer(loop, 0.25, over.set)
        while not over.is_set():
            assert time.monotonic() - begun < 10
            time.sleep(0.2)
            await asyncio.sleep(0)

    uvloop.run(main())


def test_a_body_that_nobody_wants_is_read_when_it_is_small(tmp_path: Path) -> None:
    """Answered before the body came: the connection can be used again."""

    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % 5000)
        await reader.readuntil(b"ok")
        writer.write(b"x" * 5000 + get("/"))
        await reader.readuntil(b"ok")
        writer.write(head % (2 << 20))
        assert (await reader.read()).endswith(b"ok")  # too much to wait for

    assert not run(tmp_path, test)


def test_the_application_hears_of_a_body_that_ends_too_early(tmp_path: Path) -> None:
    left: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app_left"] = left
        await application(scope, receive, send)

    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")
        assert b" 408 " in await reader.read()
        await until(lambda: left)

    assert run(tmp_path, test, app, body_timeout=0.5)["slow_request"] == 1


@pytest.mark.parametrize("garbage", [b"\x00", b"BAD\r\n\r\n"])
def test_garbage_behind_a_request_does_not_cost_its_answer(tmp_path: Path, garbage: bytes) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(get("/") + garbage)
        data = await reader.read()
        assert data.startswith(b"HTTP/1.1 200") and b"okHTTP/1.1 400" in data
        assert b"connection: close" in data

    assert run(tmp_path, test)["malformed_request"] == 1


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("how", ["h2c", "websocket", "foo/2", "without a connection header", "not at all"])
def test_an_upgrade_that_is_offered_takes_no_body_away(tmp_path: Path, how: str) -> None:
    """Two requests on each connection, the second behind the first: the offer ends nothing."""
    others = {"without a connection header": b"Upgrade: h2c\r\n", "not at all": b""}
    head = b"POST / HTTP/1.1\r\nhost: x\r\n" + others.get(how, OFFER.replace(b"h2c", how.encode()))
    bodies = (
        b"content-length: 5\r\n\r\nabcde",
        b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    )

    async def test(path: str) -> None:
        for body in bodies:
            data = (head + body) * 2
            size = len(data)
            for cuts in ([], [len(head) - 3], [data.index(b"\r\n\r\n") + 4], range(1, size)):
                reader, writer = await asyncio.open_unix_connection(path)
                for start, end in itertools.pairwise([0, *cuts, size]):
                    writer.write(data[start:end])
                    await asyncio.sleep(0.05 if len(cuts) == 1 else 0)
                for _ in range(2):
                    answer = await reader.readuntil(b"abcde")
                    assert answer.startswith(b"HTTP/1.1 200"), answer
                writer.close()

    assert not run(tmp_path, test, echo)


@pytest.mark.parametrize(
    "headers", [b"content-length: 1\r\ncontent-length: 2\r\n", b"host: y\r\n", b"content-length: x\r\n"]
)
def test_an_offer_does_not_open_what_is_refused_without_it(tmp_path: Path, headers: bytes) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + OFFER + headers + b"\r\nab")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1, answer

    assert run(tmp_path, test, echo)["malformed_request"] == 1


def test_who_is_idle_longest_makes_room_and_who_is_busy_does_not(tmp_path: Path) -> None:
    release = asyncio.Event()
    num_waiting = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_waiting
        if scope["path"] == "/wait":
            num_waiting += 1
            await release.wait()
        await application(scope, receive, send)

    async def test(path: str) -> None:
        held = []  # a writer that nobody holds is closed

        async def connect(request: bytes = b"") -> asyncio.StreamReader:
            reader, writer = await asyncio.open_unix_connection(path)
            held.append(writer)
            writer.write(request)
            return reader

        busy = [await connect(get("/wait")) for _ in range(2)]
        kept = await connect(get("/"))
        await kept.readuntil(b"ok")
        silent = await connect()
        busy.append(await connect(get("/wait")))
        assert await silent.read() == b""  # it had not asked for anything yet
        busy.append(await connect(get("/wait")))
        assert await kept.read() == b""
        await until(lambda: num_waiting == 4)
        assert b" 503 " in await (await connect()).read()  # all others are at work
        release.set()
        for reader in busy:
            await reader.readuntil(b"ok")

    refused = run(tmp_path, test, app, max_connections=4)
    assert refused == {"evicted_connection": 2, "too_many_connections": 1}


def test_uploads_stay_while_idle_connections_can_go(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        upload, uploading = await asyncio.open_unix_connection(path)
        uploading.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
        again, asking = await asyncio.open_unix_connection(path)
        asking.write(get("/"))
        await again.readuntil(b"ok")
        asking.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
        kept, idle = await asyncio.open_unix_connection(path)
        idle.write(get("/"))
        await kept.readuntil(b"ok")
        last, writer = await asyncio.open_unix_connection(path)
        writer.write(get("/"))
        assert await asyncio.wait_for(kept.read(), 5) == b"", "the idle one goes"
        await last.readuntil(b"ok")
        for reader, sender in ((upload, uploading), (again, asking)):
            sender.write(b"67890")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        # Where all others are at work, an upload goes, the longest first, rather than nobody being let in.
        for sender in (uploading, asking, writer):
            sender.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
            await asyncio.sleep(0.05)
        fresh, sender = await asyncio.open_unix_connection(path)
        sender.write(get("/"))
        await fresh.readuntil(b"ok")
        assert await upload.read() == b""
        idle.close()

    assert run(tmp_path, test, max_connections=3) == {"evicted_connection": 2}


@pytest.mark.parametrize("how", ["close", "1.0"])
@pytest.mark.slow
def test_an_early_answer_reaches_who_still_sends(tmp_path: Path, how: str) -> None:
    """Over TCP, where what is left unread resets the connection, and the answer is lost."""
    size = 4 << 20

    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        line = b"connection: close\r\n" if how == "close" else b""
        version = b"1.1" if how == "close" else b"1.0"
        writer.write(b"POST / HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (version, line, size))
        for _ in range(64):  # longer than a refused client is waited for in silence
            writer.write(bytes(size // 64))
            await writer.drain()
            await asyncio.sleep(0.05)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok")

    assert not run(tmp_path, test)


def test_a_refusal_reaches_who_sends_much(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (24 << 20))
        for _ in range(24):
            writer.write(bytes(1 << 20))
            await writer.drain()
        assert b" 400 " in await asyncio.wait_for(reader.read(), 10)
        writer.close()

    assert run(tmp_path, test, max_body_size=1 << 20) == {"malformed_request": 1}


def test_a_client_that_sends_for_ever_is_not_waited_for(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            for _ in range(100):
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.1)

    run(tmp_path, test, body_timeout=1.0)


async def stream(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"connection", b"keep-alive")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for more in (True, True, False):
        await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": more})


@pytest.mark.parametrize("version, asks", [("1.0", ""), ("1.0", "keep-alive"), ("1.1", "close")])
def test_a_stream_that_ends_its_connection(tmp_path: Path, version: str, asks: str) -> None:
    async def test(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        line = f"connection: {asks}\r\n" if asks else ""
        writer.write(f"GET / HTTP/{version}\r\nhost: x\r\n{line}\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        assert [line for line in lines if line.startswith(b"connection:")] == [b"connection: close"]
        chunked = b"transfer-encoding: chunked" in lines
        assert chunked == (version == "1.1")
        assert body == (b"9\r\ndata: x\n\n\r\n" * 3 + b"0\r\n\r\n" if chunked else b"data: x\n\n" * 3)
        writer.close()

    assert not run(tmp_path, test, stream)


def test_a_client_that_has_closed_its_side(tmp_path: Path) -> None:
    """Like `nc -N`: what is known at once is answered. What is computed hears that the client has left: a connection
    that is closed for good looks the same."""
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            ended.append("half")
            return
        assert message["body"] == scope["path"].encode()
        if scope["path"] == "/now":
            await asyncio.sleep(0.1)
            await application(scope, receive, send)
            return
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.append(scope["path"])
        if scope["path"] == "/slow":
            await send({"type": "http.response.start", "status": 499, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def test(path: str) -> None:
        for target, says, ends in (
            ("/now", b"200", b"ok"),
            ("/slow", b"499", b"\r\n\r\n"),
            ("/stream", b"200", b"x\r\n"),
        ):
            reader, writer = await asyncio.open_unix_connection(path)
            length = len(target)
            writer.write(f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{target}".encode())
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 " + says) and answer.endswith(ends), answer
            writer.close()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST /now HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n/n")
        writer.write_eof()  # half a request
        assert await asyncio.wait_for(reader.read(), 5) == b""

    run(tmp_path, test, app)
    assert ended == ["/slow", "/stream", "half"]


async def babble(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.1)


def test_who_was_refused_and_sends_on_keeps_nobody_out(tmp_path: Path) -> None:
    async def test(path: str) -> None:
        strangers = [await asyncio.open_unix_connection(path) for _ in range(4)]
        for reader, writer in strangers:
            writer.write(b"\x00")
            assert b" 400 " in await reader.read()
        sending = [asyncio.create_task(babble(writer)) for _, writer in strangers]
        others = [await asyncio.open_unix_connection(path) for _ in range(4)]
        for reader, writer in others:
            writer.write(get("/"))
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), 5)).startswith(b"HTTP/1.1 200")
        await asyncio.wait_for(asyncio.gather(*sending), 5)  # each made room for one

    assert run(tmp_path, test, max_connections=4) == {"malformed_request": 4, "evicted_connection": 4}


def test_who_was_refused_for_want_of_room_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do such clients become ever more, however long they send."""
    monkeypatch.setattr(http_protocol, "RESERVED_FILES", 6)
    release = asyncio.Event()
    num_waiting = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_waiting
        num_waiting += 1
        await release.wait()
        await application(scope, receive, send)

    async def test(path: str) -> None:
        busy = [await asyncio.open_unix_connection(path) for _ in range(2)]
        for _, writer in busy:
            writer.write(get("/"))
        await until(lambda: num_waiting == 2)
        refused = []
        for _ in range(6):
            reader, writer = await asyncio.open_unix_connection(path)
            assert b" 503 " in await reader.read()
            refused.append((writer, asyncio.create_task(babble(writer))))
        await until(lambda: sum(task.done() for _, task in refused) == 3)
        release.set()
        for reader, _ in busy:
            await reader.readuntil(b"ok")
        for writer, task in refused:
            task.cancel()
            writer.close()
        assert num_waiting == 2

    assert run(tmp_path, test, app, max_connections=2)["too_many_connections"] == 6
