"""What strangers try with pictures: hosts of this network, files that lie, answers without an end."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vserve.server.lanes import TENANT
from vserve.server.media import fetch
from vserve.server.media.decode import MOST_PIXELS, colours
from vserve.server.media.fetch import AT_ONCE, Fetcher, FetchError, is_public
from vserve.server.options.config import ServerConfig

from .seeing import file_of

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """Named pictures.test and others.test; `answer` writes what it says to a path."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.paths: list[str] = []
        self.hosts: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        self.paths.append(path)
        self.hosts.append(head.lower().partition("host: ")[2].split()[0])
        try:
            await self.answer(path, writer)
            writer.close()
        except (ConnectionError, asyncio.CancelledError):
            pass

    def url(self, path: str = "/a.png", host: str = "pictures.test") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def host_of(answer: Answer) -> AsyncIterator[Host]:
    host = Host(answer)
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


async def whole(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK", more: str = "") -> None:
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body)
    await writer.drain()


async def picture(path: str, writer: asyncio.StreamWriter) -> None:
    await whole(writer, file_of())


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are asked for. They mean 127.0.0.1, which counts as public; the other addresses of this machine do
    not."""
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        if not host.endswith(".test"):
            raise OSError("no such name")
        return ["127.0.0.3" if host == "inside.test" else "127.0.0.1"]

    monkeypatch.setattr(fetch, "_resolve", resolve)
    judge = is_public
    monkeypatch.setattr(fetch, "is_public", lambda address: address == ip_address("127.0.0.1") or judge(address))
    return asked


def fetcher(**options: Any) -> Fetcher:
    return Fetcher(ServerConfig(**options))


async def refused(fetcher: Fetcher, url: str, words: str) -> None:
    with pytest.raises(FetchError) as found:
        await fetcher.fetch(url)
    assert words in str(found.value)


PRIVATE = (
    "127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "192.0.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "fe80::1", "fc00::1", "ff02::1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::",
    "2001:db8::1", "2001:0:0:0:0:0:f5ff:fffe",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_no_address_of_this_network_is_dialled(address: str) -> None:
    assert not is_public(ip_address(address))
    literal = f"[{address}]" if ":" in address else address
    asyncio.run(refused(fetcher(), f"http://{literal}:9/a.png", "without a public address"))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_everybody_are(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("name", ["localhost", "0x7f.1", "2130706433", "127.1", "017700000001"])
def test_other_spellings_of_this_machine(name: str) -> None:
    async def attack() -> None:
        with pytest.raises(FetchError) as found:
            await fetcher().fetch(f"http://{name}:9/a.png")
        assert "without a public address" in str(found.value) or "not known" in str(found.value)

    asyncio.run(attack())


def test_a_host_is_resolved_once_and_asked_by_its_name(resolved: list[str]) -> None:
    async def attack() -> None:
        async with host_of(picture) as host:
            assert await fetcher().fetch(host.url()) == file_of()
            assert resolved == ["pictures.test"] and host.hosts == [f"pictures.test:{host.port}"]

    asyncio.run(attack())


def test_each_redirect_is_judged(resolved: list[str]) -> None:
    async def redirect(path: str, writer: asyncio.StreamWriter) -> None:
        kind, _, count = path.strip("/").partition("-")
        port = writer.get_extra_info("sockname")[1]
        if kind == "end":
            return await whole(writer, file_of())
        inward = {"local": f"http://127.0.0.2:{port}/end", "file": "file:///etc/passwd", "ftp": "ftp://pictures.test/a",
                  "meta": "http://169.254.169.254/", "name": f"http://inside.test:{port}/end"}  # fmt: skip
        where = inward.get(kind) or (f"/on-{int(count) - 1}" if int(count) else f"http://others.test:{port}/end")
        await whole(writer, b"", "302 Found", f"location: {where}\r\n")

    async def attack() -> None:
        async with host_of(redirect) as host:
            assert await fetcher().fetch(host.url("/on-2")) == file_of()
            assert host.hosts[-1] == f"others.test:{host.port}"
            await refused(fetcher(), host.url("/on-3"), "more than 3 redirects")
            for kind in ("local", "meta", "name"):
                await refused(fetcher(), host.url(f"/{kind}"), "without a public address")
            for kind in ("file", "ftp"):
                await refused(fetcher(), host.url(f"/{kind}"), "neither http:// nor https://")
            allowed = fetcher(allowed_media_domains=("pictures.test",))
            await refused(allowed, host.url("/on-0"), "--allowed-media-domains does not name")

    asyncio.run(attack())


def test_an_answer_that_never_ends(resolved: list[str]) -> None:
    """By size where it comes fast, by time where it comes slowly."""

    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * (1 if path == "/slow" else 65536))
            await writer.drain()
            await asyncio.sleep(0.01 if path == "/slow" else 0)

    async def attack() -> None:
        async with host_of(endless) as host:
            await refused(fetcher(max_media_size=1 << 20), host.url("/fast"), "more than 1048576 bytes")
            await refused(fetcher(media_fetch_timeout=0.3), host.url("/slow"), "did not come within 0.3 s")

    asyncio.run(attack())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", "more than"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 0\r\n\r\n", "compressed once more"),
        (b"nonsense\r\n\r\n", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
    ],
)
def test_answers_that_are_none(resolved: list[str], answer: bytes, words: str) -> None:
    async def wrong(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    async def attack() -> None:
        async with host_of(wrong) as host:
            await refused(fetcher(), host.url(), words)

    asyncio.run(attack())


def test_slow_hosts_hold_nobody_up(resolved: list[str]) -> None:
    """64 pictures of one tenant that never come: another one's comes, and of the first one a few at a time are asked
    for."""
    waiting = asyncio.Event()

    async def hangs(path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/slow":
            await waiting.wait()
        await whole(writer, file_of())

    async def attack() -> None:
        async with host_of(hangs) as host:
            one = fetcher(media_fetch_timeout=60)
            TENANT.set(1)
            slow = [asyncio.create_task(one.fetch(host.url("/slow"))) for _ in range(64)]
            while len(host.paths) < AT_ONCE:
                await asyncio.sleep(0.005)
            TENANT.set(2)
            assert await asyncio.create_task(one.fetch(host.url("/fast"))) == file_of()
            assert host.paths.count("/slow") == AT_ONCE and not any(task.done() for task in slow)
            waiting.set()
            assert await asyncio.gather(*slow) == [file_of()] * 64

    asyncio.run(attack())


def test_allowed_hosts(resolved: list[str]) -> None:
    """Whoever names a host of their own network means it."""

    async def attack() -> None:
        async with host_of(picture) as host:
            await refused(fetcher(), host.url(host="inside.test"), "without a public address")
            named = fetcher(allowed_media_domains=("INSIDE.test", "*.other.test"))
            await refused(named, host.url(), "does not name")
            await refused(named, host.url(host="inside.test.example"), "does not name")
            await refused(named, host.url(host="127.0.0.1"), "does not name")
            await refused(named, "http://user:password@inside.test/a", "leave them out")

    asyncio.run(attack())


def test_files_of_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a b.png").write_bytes(file_of())
    (tmp_path / "secret.png").write_bytes(file_of())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe.png")

    async def attack() -> None:
        await refused(fetcher(), f"file://{folder}/a%20b.png", "--allowed-local-media-path")
        one = fetcher(allowed_local_media_path=str(folder), max_media_size=1 << 20)
        assert await one.fetch(f"file://{folder}/a%20b.png") == file_of()
        for name in ("../secret.png", "%2e%2e/secret.png", "link.png", "pipe.png", "none.png", "", "a%00b", "%ff.png"):
            await refused(one, f"file://{folder}/{name}", "no file in the folder")
        await refused(one, "file:///etc/passwd", "no file in the folder")
        await refused(one, f"file://elsewhere{folder}/a%20b.png", "another host")
        small = fetcher(allowed_local_media_path=str(folder), max_media_size=10)
        await refused(small, f"file://{folder}/a%20b.png", "more than 10 bytes")

    asyncio.run(attack())


# ---- files that lie ----


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    """Of a size that its header alone says."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_bombs_are_refused_by_their_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of them is decoded."""
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    for width, height in ((60_000, 60_000), (1, MOST_PIXELS + 1), (2**31 - 1, 2**31 - 1)):
        with pytest.raises(ValueError, match=r"pixels|broken|no PNG"):
            colours(png_of(width, height))


@pytest.mark.parametrize("form", ["BMP", "TIFF", "PPM", "ICO", "TGA", "PCX", "EPS", "PDF"])
def test_other_formats_are_not_tried(form: str) -> None:
    with pytest.raises(ValueError, match="no PNG, JPEG, WEBP or GIF picture"):
        colours(file_of(form=form))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_that_are_cut_off_or_damaged(form: str) -> None:
    """Each beginning of one, and one with each of some bytes changed: an error in our words, or a picture."""
    file = file_of(48, 40, form=form)
    for end in range(0, len(file), max(1, len(file) // 24)):
        with_end = file[:end]
        try:
            assert colours(with_end).shape == (40, 48, 3)
        except ValueError as error:
            assert str(error).startswith(("its ", "it "))
    for at in range(4, len(file), max(1, len(file) // 64)):
        try:
            colours(file[:at] + bytes((file[at] ^ 0xFF,)) + file[at + 1 :])
        except ValueError as error:
            assert str(error).startswith(("its ", "it "))


def test_of_animated_pictures_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue", "green")]
    for form in ("GIF", "WEBP", "PNG"):
        found = io.BytesIO()
        frames[0].save(found, form, save_all=True, append_images=frames[1:], lossless=True)
        assert colours(found.getvalue())[0, 0].tolist() == [255, 0, 0]


def test_pictures_are_as_people_see_them() -> None:
    """Upright, on white, and in colours whatever the file has."""
    exif = Image.Exif()
    exif[0x0112] = 6  # it was taken with the camera turned
    image, found = Image.new("RGB", (64, 32), "red"), io.BytesIO()
    image.save(found, "JPEG", exif=exif)
    assert colours(found.getvalue()).shape == (64, 32, 3)
    for mode, colour, seen in (
        ("RGBA", (0, 0, 0, 0), [255, 255, 255]), ("LA", (0, 255), [0, 0, 0]), ("L", 7, [7, 7, 7]),
        ("1", 1, [255, 255, 255]), ("P", 0, [0, 0, 0]), ("I;16", 0x8001, [128, 128, 128]),
    ):  # fmt: skip
        found = io.BytesIO()
        Image.new(mode, (8, 8), colour).save(found, "PNG")
        assert colours(found.getvalue())[0, 0].tolist() == seen, mode
    found = io.BytesIO()
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(found, "JPEG")
    assert colours(found.getvalue())[0, 0].tolist() == [255, 255, 255]
