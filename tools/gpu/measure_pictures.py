"""Measures a server with pictures: one alone, the same again, sixteen at once beside answers that run, eight a second.

Usage: python tools/gpu/measure_pictures.py [--shape qwen3-vl-8b] [--size 1024] [--options="…"] [--seconds 12]
       python tools/gpu/measure_pictures.py --url http://localhost:8000    of a server that runs already

Dummy weights; pictures are JPEG files of one megapixel, each another one, sent as data URLs. A table is printed, times
in ms. Without --url it needs a GPU; Pillow always.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from model_folder import SEEING, write_seeing_model
from PIL import Image
from processes import Server, VServe

TEXT_TOKENS = 1024  # as many as a picture of a megapixel has
PICTURES_A_SECOND = 8


@dataclass
class Stream:
    """A streamed answer: when it was asked for, and when each piece of it came."""

    begun: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begun

    def gaps(self, since: float, until: float) -> list[float]:
        """Between pieces of which the later one came then."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False) if since <= b <= until]


def picture(seed: int, size: int) -> str:
    """A data URL of a JPEG with smooth parts and noise, some 200 KB a megapixel."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    large = np.asarray(small.resize((size, size), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = np.clip(large + generator.integers(-6, 7, large.shape), 0, 255).astype(np.uint8)
    found = io.BytesIO()
    Image.fromarray(noisy).save(found, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(found.getvalue()).decode()


class Client:
    """Chats over HTTP, each on a connection of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    async def ask(self, content: Any, max_tokens: int, stream: Stream | None = None) -> Stream:
        body = {
            "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "ignore_eos": True,
            "stream": True, "temperature": 0,
        }  # fmt: skip
        data = json.dumps(body).encode()
        stream = stream or Stream()
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(data)}\r\n"
        stream.begun = time.perf_counter()
        writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
        async for line in reader:
            if line.startswith(b"data: {") and b'"content":"' in line:
                stream.times.append(time.perf_counter())
        writer.close()
        return stream

    async def look(self, url: str, max_tokens: int = 8) -> Stream:
        return await self.ask(
            [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}], max_tokens
        )


async def every(seconds: float, each: float, make: Callable[[int], Awaitable[Stream]]) -> list[Stream]:
    """Starts one after each so many seconds."""
    tasks = []
    for index in range(int(seconds / each)):
        tasks.append(asyncio.ensure_future(make(index)))
        await asyncio.sleep(each)
    return list(await asyncio.gather(*tasks))


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def spread(values: list[float]) -> str:
    return ", ".join(ms(at(values, share)) for share in (0.5, 0.99, 1))


def waited(streams: list[Stream]) -> str:
    return spread([stream.ttft for stream in streams])


async def of_text(client: Client) -> list[tuple[str, str]]:
    texts = [await client.ask("What is this?", 200) for _ in range(4)][1:]
    tpot = statistics.median(gap for one in texts for gap in one.gaps(0, time.perf_counter()))
    return [("TPOT of text, 1 stream", f"{1000 * tpot:.3f}")]


async def measure(client: Client, size: int, seconds: float) -> list[tuple[str, str]]:
    rows = []
    urls = iter([picture(seed, size) for seed in range(60 + int(PICTURES_A_SECOND * seconds))])
    for _ in range(3):
        await client.look(next(urls))
    alone = [await client.look(next(urls)) for _ in range(10)]
    rows.append(("TTFT of a new picture, idle: p50, p99, longest", waited(alone)))
    same = next(urls)
    await client.look(same)
    rows.append(("TTFT of the same picture again", waited([await client.look(same) for _ in range(10)])))
    letters = np.random.default_rng(2).integers(97, 123, (10, TEXT_TOKENS), dtype=np.uint8)
    texts = [await client.ask(one.tobytes().decode(), 8) for one in letters]
    rows.append((f"TTFT of a text of {TEXT_TOKENS} tokens", waited(texts)))
    rows += await of_text(client)

    running = [Stream() for _ in range(32)]
    tasks = [asyncio.ensure_future(client.ask("x" * (20 + i), 12000, one)) for i, one in enumerate(running)]

    async def gaps_while(work: Awaitable[Any]) -> tuple[list[float], Any]:
        since = time.perf_counter()
        found = await work
        until = time.perf_counter()
        return [gap for one in running for gap in one.gaps(since, until)], found

    await asyncio.sleep(2)
    quiet, _ = await gaps_while(asyncio.sleep(3))
    rows.append(("32 streams alone: ITL p50, p99, longest", spread(quiet)))
    burst = [next(urls) for _ in range(16)]
    gaps, looked = await gaps_while(asyncio.gather(*(client.look(url) for url in burst)))
    rows.append(("beside them 16 pictures at once: ITL p50, p99, longest", spread(gaps)))
    rows.append(("... their TTFT", waited(looked)))
    await asyncio.sleep(1)
    usual, times = statistics.fmean(quiet), 1 / PICTURES_A_SECOND
    gaps, looked = await gaps_while(every(seconds, times, lambda _: client.look(next(urls), 16)))
    with_pictures = statistics.fmean(gaps)
    rows.append(("8 pictures a second: TPOT, of none", f"{ms(with_pictures)}, {with_pictures / usual:.2f} x"))
    rows.append(("... their TTFT", waited(looked)))
    words = np.random.default_rng(1).integers(97, 123, (int(seconds / times), TEXT_TOKENS), dtype=np.uint8)
    gaps, looked = await gaps_while(every(seconds, times, lambda i: client.ask(words[i].tobytes().decode(), 16)))
    with_texts = statistics.fmean(gaps)
    rows.append(
        (f"8 texts of {TEXT_TOKENS} tokens a second: TPOT, of none", f"{ms(with_texts)}, {with_texts / usual:.2f} x")
    )
    rows.append(("pictures against these texts", f"{with_pictures / with_texts:.2f} x"))
    assert all(not task.done() for task in tasks), "the streams ended too early: fewer seconds, or more tokens"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rows


def print_rows(work: Coroutine[Any, Any, list[tuple[str, str]]]) -> None:
    for name, value in asyncio.run(work):
        print(f"| {name} | {value} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs already, which sees pictures")
    parser.add_argument("--shape", default="qwen3-vl-8b", choices=SEEING)
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--seconds", type=float, default=12, help="of each load of eight a second")
    parser.add_argument("--options", default="", help="more options of the server")
    args = parser.parse_args()
    if args.url:
        url = urlsplit(args.url)
        print_rows(measure(Client(url.hostname or "localhost", url.port or 80), args.size, args.seconds))
        return
    with tempfile.TemporaryDirectory() as scratch:
        vserve = VServe(Path(scratch), 300)
        model = write_seeing_model(Path(scratch) / "model", args.shape)
        options = ["--load-format=dummy", "--max-model-len=16384", *args.options.split()]
        for more in ([], ["--language-model-only"]):
            server = Server(vserve, model, [*options, *more])
            try:
                started = server.wait_until_ready()
                print(f"ready after {started['ready']:.1f} s {' '.join(more)}", flush=True)
                client = Client("127.0.0.1", server.port)
                print_rows(of_text(client) if more else measure(client, args.size, args.seconds))
                print(server.counters(), flush=True)
            finally:
                server.stop()


if __name__ == "__main__":
    main()
