"""Connections of TLS, from their first packet on: counted, timed and made to give way as plain ones are."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop

from vserve.server.http.uvicorn_options import uvicorn_options
from vserve.server.options.config import ServerConfig

HUGE = b"x" * (4 << 20)
GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"
Test = Callable[[tuple[str, int]], Awaitable[None]]


async def application(scope: Any, receive: Any, send: Any) -> None:
    body = HUGE if scope["path"] == "/huge" else scope["scheme"].encode()
    if scope["path"] == "/slow":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close" if body is HUGE else b"keep-alive")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    names = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-out", names[0], "-keyout", names[1]], check=True, capture_output=True,
    )  # fmt: skip
    return names


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def run(files: tuple[str, str], request: pytest.FixtureRequest) -> Callable[..., Counter[str]]:
    def run(test: Test, **options: Any) -> Counter[str]:
        """Runs `await test(address)` against a server; returns what it refused."""
        refused: Counter[str] = Counter()

        async def main() -> None:
            errors: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
            config = ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1], **options)
            listener = socket.create_server(("127.0.0.1", 0))
            settings = uvicorn_options(config, lambda reason: refused.update([reason]))
            server = uvicorn.Server(
                uvicorn.Config(application, log_level="warning", ws="none", lifespan="off", **settings)
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                await asyncio.wait_for(test(listener.getsockname()), 60)
            finally:
                server.should_exit = server.force_exit = True
                await serving
                gc.collect()
                assert not errors

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())
        return refused

    return run


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def silent(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address)


async def ask(
    address: tuple[str, int], path: bytes = b"/"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, bytes]:
    reader, writer = await asyncio.open_connection(*address, ssl=trusting())
    writer.write(GET % path)
    head = await reader.readuntil(b"\r\n\r\n")
    return reader, writer, int(head.split()[1]), await reader.readexactly(int(head.split(b"length: ")[1].split()[0]))


async def is_closed(reader: asyncio.StreamReader, seconds: float) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), seconds) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


class Raw:
    """A client whose bytes are sent when it says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting().wrap_bio(self._incoming, self._outgoing)

    async def shake_hands(self, then: bytes) -> None:
        """`then` goes with the last words of the handshake, in one piece."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.writer.write(self._outgoing.read())
                if not (data := await self.reader.read(1 << 16)):
                    raise ConnectionResetError from None
                self._incoming.write(data)
        self._tls.write(then)
        self.writer.write(self._outgoing.read())

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                if not (data := await self.reader.read(1 << 16)):
                    return b""
                self._incoming.write(data)


@contextlib.asynccontextmanager
async def closing(*writers: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


def test_row_31_silent_connections_give_way_to_honest_ones(run: Any) -> None:
    """Many more than there may be, which never say a word, and honest clients between them."""

    async def test(address: tuple[str, int]) -> None:
        strangers: list[Any] = []
        for _ in range(6):
            strangers += [await silent(address) for _ in range(20)]
            _, writer, status, body = await ask(address)
            writer.transport.abort()
            assert (status, body) == (200, b"https")
        async with closing(*(writer for _, writer in strangers)):
            closed = await asyncio.gather(*(is_closed(reader, 5) for reader, _ in strangers[:100]))
            assert sum(closed) == 100  # the first ones, and none of them after a minute

    assert run(test, max_connections=8, header_timeout=30.0)["evicted_connection"] >= 100


def test_a_handshake_takes_no_longer_than_a_head(run: Any) -> None:
    async def test(address: tuple[str, int]) -> None:
        (quiet, one), (mumbling, two), (raving, three) = [await silent(address) for _ in range(3)]
        async with closing(one, two, three):
            two.write(b"\x16\x03\x01\x02\x00")
            three.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await asyncio.gather(*(is_closed(reader, 10) for reader in (quiet, mumbling))) == [True, True]
            while not await is_closed(raving, 10):  # after what TLS says to that
                pass

    run(test, header_timeout=0.5)


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(run: Any) -> None:
    async def test(address: tuple[str, int]) -> None:
        raw = Raw(*await silent(address))
        async with closing(raw.writer):
            await raw.shake_hands(GET % b"/")
            answer = b""
            while not answer.endswith(b"https"):
                piece = await raw.read()
                assert piece, answer
                answer += piece

    run(test)


def test_clients_that_leave_in_the_middle_of_a_handshake(run: Any) -> None:
    async def test(address: tuple[str, int]) -> None:
        for round in range(12):
            strangers = [await silent(address) for _ in range(10)]
            raws = [Raw(*one) for one in strangers]
            shaking = [asyncio.create_task(raw.shake_hands(b"")) for raw in raws]
            for _ in range(round % 4):
                await asyncio.sleep(0)
            for raw in raws:
                reset(raw.writer)
            for task in shaking:
                task.cancel()
            await asyncio.gather(*shaking, return_exceptions=True)
        _, writer, status, _ = await ask(address)
        writer.transport.abort()
        assert status == 200

    run(test, max_connections=6)


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_who_finds_no_room_hears_so(run: Any) -> None:
    async def test(address: tuple[str, int]) -> None:
        busy = [await asyncio.open_connection(*address, ssl=trusting()) for _ in range(2)]
        async with closing(*(writer for _, writer in busy)):
            for _, writer in busy:
                writer.write(GET % b"/slow")
            await asyncio.sleep(0.3)
            for _ in range(3):
                _, writer, status, body = await ask(address)
                writer.transport.abort()
                assert status == 503 and b"too_many_connections" in body
            assert not any(reader.at_eof() for reader, _ in busy)

    assert run(test, max_connections=2)["too_many_connections"] == 3


def test_who_never_says_goodbye_is_not_waited_for(run: Any) -> None:
    """TLS asks both ends to: who does not takes nobody's place."""

    async def test(address: tuple[str, int]) -> None:
        kept = [Raw(*await silent(address)) for _ in range(4)]
        async with closing(*(raw.writer for raw in kept)):
            for raw in kept:
                await raw.shake_hands(GET % b"/")
                assert await raw.read()
            for _ in range(4):
                _, writer, status, _ = await ask(address)
                assert status == 200
                writer.transport.abort()
            async with asyncio.timeout(10):  # TLS would wait a minute
                while not await is_closed(kept[0].reader, 5):
                    pass

    assert run(test, max_connections=4)["evicted_connection"] >= 1


def test_what_was_answered_leaves_before_the_connection_ends(run: Any) -> None:

    async def test(address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address, ssl=trusting(), limit=1 << 14)
        async with closing(writer):
            writer.write(GET % b"/huge")
            await reader.readuntil(b"\r\n\r\n")
            size = 0
            while size < len(HUGE):
                piece = await reader.read(1 << 16)
                assert piece, size
                size += len(piece)
                await asyncio.sleep(0.005)
            assert await reader.read() == b""

    assert not run(test)
