"""What pictures cost, and what they cost others: python tools/benchmarks/pictures.py URL

    [--size 1024] [--streams 32] [--rate 8] [--seconds 20] [--tokens 1024]

One after another on an idle server: the time to the first token of a picture that nobody has sent before, of one that
comes again, and of a text of as many tokens. Then while so many text streams run: the longest gap between their tokens
when 16 pictures come at once, and their mean time a token alone, beside so many pictures a second, and beside as many
texts of --tokens tokens. Pictures are JPEGs of --size x --size pixels. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
from PIL import Image

IDLE = 10  # requests of each kind on an idle server
AT_ONCE = 16
_numbers = itertools.count(time.time_ns())


def picture(size: int) -> dict[str, Any]:
    """A part of a message, of a picture that nobody has seen: soft colours, as photographs have."""
    rng = np.random.default_rng(next(_numbers))
    image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).resize((size, size), Image.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    encoded = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded}"}}


def text(tokens: int) -> dict[str, Any]:
    """About so many tokens that no cache holds."""
    rng = np.random.default_rng(next(_numbers))
    return {"type": "text", "text": " ".join(f"{n}" for n in rng.integers(0, 10, tokens // 2))}


class Server:
    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model

    async def arrivals(self, *parts: dict[str, Any], max_tokens: int | None = None) -> AsyncIterator[float]:
        """When each token of an answer comes, by default as many as the context has room for."""
        body = {
            "model": self._model, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
            first = True  # the event that names the role comes with the first token
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if not first:
                        yield time.perf_counter()
                    first = False

    async def first_token(self, *parts: dict[str, Any]) -> float:
        """Seconds."""
        start = time.perf_counter()
        arrivals = [at async for at in self.arrivals(*parts, max_tokens=2)]
        return arrivals[0] - start

    async def idle(self, make: Callable[[], dict[str, Any]]) -> float:
        """Median milliseconds to the first token."""
        found = []
        for _ in range(IDLE):
            part = await asyncio.to_thread(make)
            found.append(await self.first_token(part, {"type": "text", "text": "What is this?"}))
        return round(1000 * statistics.median(found), 1)

    async def beside(
        self, num_streams: int, seconds: float, load: Callable[[], Any] | None, rate: float
    ) -> dict[str, float]:
        """Mean and longest milliseconds a token of streams, while `load` is called so often a second."""
        gaps: list[float] = []
        over = asyncio.Event()

        async def stream() -> None:
            last = None
            async for at in self.arrivals(text(64)):
                if last is not None and not over.is_set():
                    gaps.append(at - last)
                last = at
                if over.is_set():
                    return

        streams = [asyncio.create_task(stream()) for _ in range(num_streams)]
        await asyncio.sleep(2)
        gaps.clear()
        loads = []
        for _ in range(max(1, int(seconds * rate))):
            if load is not None:
                loads.append(asyncio.create_task(load()))
            await asyncio.sleep(1 / rate)
        over.set()
        await asyncio.gather(*streams, *loads)
        return {"mean": round(1000 * statistics.fmean(gaps), 2), "longest": round(1000 * max(gaps), 1)}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        if "image" not in model.get("modalities", ()):
            raise SystemExit(f"{model['id']} sees no pictures")
        server = Server(client, model["id"])
        again = picture(arguments.size)
        question = {"type": "text", "text": "What is this?"}
        for part in (picture(arguments.size), again, text(arguments.tokens)):  # what is first is compiled, or loaded
            await server.first_token(part, question)
        found: dict[str, Any] = {
            "first token, ms": {
                "new picture": await server.idle(lambda: picture(arguments.size)),
                "the same again": await server.idle(lambda: again),
                "text": await server.idle(lambda: text(arguments.tokens)),
            }
        }
        made = [picture(arguments.size) for _ in range(AT_ONCE + int(arguments.rate * arguments.seconds) + 1)]

        async def at_once() -> None:
            await asyncio.gather(*(server.first_token(made.pop(), question) for _ in range(AT_ONCE)))

        streams, seconds, rate = arguments.streams, arguments.seconds, arguments.rate
        found["a token of others, ms"] = {
            "alone": await server.beside(streams, seconds, None, rate),
            f"{AT_ONCE} pictures at once": await server.beside(streams, 3, at_once, 1 / 3),
            f"{rate:g} pictures a second": await server.beside(
                streams, seconds, lambda: server.first_token(made.pop(), question), rate
            ),
            f"{rate:g} texts a second": await server.beside(
                streams, seconds, lambda: server.first_token(text(arguments.tokens), question), rate
            ),
        }
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=1024)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
