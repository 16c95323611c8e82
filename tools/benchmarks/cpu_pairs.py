"""This checkout against another, over HTTP on the CPU, in turns: what a change costs the API process and its clients.

Usage: python tools/benchmarks/cpu_pairs.py OLD [--pairs N] [--tokens N] [--requests N] [--new DIR] [-- OPTION …]
OLD is another checkout of vserve. Both serve the demo model with one thread; each pair is measured on both, the older
first in every second pair. Printed are the medians, those of the ratios (this one / OLD) with their standard error,
and their range: of tokens a second of one stream and of 16, the time of a short request, and the CPU time of the API
process (all its threads, as the kernel counts it) by streamed token and by short request. The rows of CPU need many
short pairs on a busy machine, the others a quiet one. OPTIONs are of this checkout's server alone: with OLD the same
checkout, they are what is measured (`-- --no-access-log`).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from cpu_http import DEMO, STREAMS, over_http

HERE = Path(__file__).parents[2]


class Server:
    def __init__(self, checkout: Path, scratch: Path, name: str, more: Sequence[str] = ()) -> None:
        (scratch / name).mkdir()
        (scratch / name / "vserve").symlink_to(checkout)  # the root of a checkout is the package
        options = ["--port", "0", "--device", "cpu", "--cpu-threads", "1", "--max-num-seqs", str(STREAMS)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vserve.server.cli.main", str(DEMO), *options, "--served-model-name", "demo",
             *more],
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
        """Of the API process so far, but for threads that have ended: those of a server do not."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

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
    begun = server.cpu_seconds()
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
        "API CPU a token, one stream, s": (before - begun) / tokens,
        f"API CPU a token, {STREAMS} streams, s": (streamed - before) / (STREAMS * tokens),
        "API CPU a short request, s": (asked - streamed) / requests,
    }


def report(rows: dict[str, list[tuple[float, float]]]) -> None:
    """`rows`: (old, new) of each pair."""
    for name, values in rows.items():
        ratios = [after / before for before, after in values]
        medians = [statistics.median(side) for side in zip(*values, strict=True)]
        # Of a median, were they normal; by the middle half of them, which what disturbs a few does not move.
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        error = 1.253 * (high - low) / 1.349 / math.sqrt(len(ratios))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        ratio = f"{statistics.median(ratios):.4f} ± {error:.4f}"
        print(f"{name:<34}{medians[0]:>12.6g}{medians[1]:>12.6g}   {ratio}  ({spread})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--new", type=Path, default=HERE, help="in place of this checkout")
    parser.add_argument("options", nargs="*", metavar="OPTION")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = Server(arguments.old.resolve(), Path(folder), "old")
        new = Server(arguments.new.resolve(), Path(folder), "new", arguments.options)
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
    report(rows)


if __name__ == "__main__":
    main()
