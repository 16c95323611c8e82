"""This checkout against another, over HTTP on the CPU, in turns: what a change costs the API process and its clients.

Usage: python tools/benchmarks/cpu_pairs.py OLD [--pairs N] [--tokens N] [--requests N]
OLD is another checkout of vserve. Both serve the demo model with one thread; each pair is measured on both, the older
first in every second pair, and the medians of the ratios (this one / OLD) are printed: tokens a second of one stream
and of 16, the time of a short request, and the CPU time of the API process by streamed token and by short request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from cpu_http import DEMO, STREAMS, over_http

HERE = Path(__file__).parents[2]
TICK = os.sysconf("SC_CLK_TCK")


class Server:
    def __init__(self, checkout: Path, scratch: Path, name: str) -> None:
        (scratch / name).mkdir()
        (scratch / name / "vserve").symlink_to(checkout)  # the root of a checkout is the package
        options = ["--port", "0", "--device", "cpu", "--cpu-threads", "1", "--max-num-seqs", str(STREAMS)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vserve.server.cli.main", str(DEMO), *options, "--served-model-name", "demo"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=scratch,
            env={**os.environ, "PYTHONPATH": str(scratch / name)},
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = next(
            found[1].replace("localhost", "127.0.0.1")
            for line in self._process.stdout
            if (found := re.match(r"(http://\S+)", line))
        )
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def cpu_seconds(self) -> float:
        """Of the API process so far, by the kernel's clock ticks."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


async def short_requests(url: str, count: int) -> float:
    """Seconds of one, the median of so many, one after the other."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    seconds = []
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(count):
            started = time.perf_counter()
            (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(server: Server, tokens: int, requests: int) -> dict[str, float]:
    prompts = [[5 + i, 6, 7, 8, 9] for i in range(STREAMS)]
    one = asyncio.run(over_http(server.url, "demo", prompts[:1], tokens))
    before = server.cpu_seconds()
    many = asyncio.run(over_http(server.url, "demo", prompts, tokens))
    streamed = server.cpu_seconds()
    short = asyncio.run(short_requests(server.url, requests))
    asked = server.cpu_seconds()
    return {
        "tokens/s, one stream": one,
        f"tokens/s, {STREAMS} streams": many,
        "a short request, s": short,
        "API CPU a streamed token, s": (streamed - before) / (STREAMS * tokens),
        "API CPU a short request, s": (asked - streamed) / requests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = Server(arguments.old.resolve(), Path(folder), "old")
        new = Server(HERE, Path(folder), "new")
        try:
            rows: dict[str, list[tuple[float, float]]] = {}
            for pair in range(-1, arguments.pairs):  # the first warms up
                order = (old, new) if pair % 2 else (new, old)
                found = {id(server): measure(server, arguments.tokens, arguments.requests) for server in order}
                for name, value in found[id(old)].items() if pair >= 0 else ():
                    rows.setdefault(name, []).append((value, found[id(new)][name]))
        finally:
            old.close()
            new.close()
    for name, values in rows.items():
        ratios = sorted(after / before for before, after in values)
        medians = [statistics.median(side) for side in zip(*values, strict=True)]
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"{name:<30}{medians[0]:>12.6g}{medians[1]:>12.6g}   {statistics.median(ratios):.3f}  ({spread})")


if __name__ == "__main__":
    main()
