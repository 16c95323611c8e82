"""A long mixed load on one server: what grows, and whether it still answers as at first.

Usage: python tools/benchmarks/soak.py [--minutes 30] [--rate 2] [--every 30] [-- flags of vserve]

Five in a hundred requests are nonsense and five in a hundred clients leave. Every answer is compared with that of the
unloaded server. The first sixth of the time is for warming up. Exit code 1 unless, over the rest,
  - no process's resident memory grows by more than 2 % of itself or 8 MiB an hour, whichever is more,
  - descriptors and KV blocks are back where they were once nothing runs,
  - every answer is right, and the clients' counts are those of /metrics;
the p99 of the time between two events of a stream, which depends on what else the machine does, is printed: first
third against last third.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

MIB = 1 << 20


def load_module(name: str) -> ModuleType:
    """A file of tests/e2e, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tests" / "e2e" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Sample:
    minutes: float
    memory: dict[str, int]  # bytes, by process
    files: dict[str, int]
    blocks: int  # in use
    num_gaps: int
    gap_p50: float  # seconds
    gap_p99: float


def processes(pid: int) -> dict[str, int]:
    """The server and its children, by what they are."""
    found = {"api": pid}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        found["engine" if b"engine.start.process" in command else "grammar"] = int(child)
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def slope(times: list[float], values: list[float]) -> float:
    """By least squares: values a minute."""
    mean_time, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_time) ** 2 for t in times)
    return sum((t - mean_time) * (v - mean) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0


class Soak:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=60)
        self.attacks = load_module("attacks")
        self.load = load_module("load").Load(url)
        self.load.on_gap = lambda seconds: self.gaps.append(seconds)
        self.gaps: list[float] = []
        self.samples: list[Sample] = []
        self.started = time.monotonic()

    def metric(self, name: str, label: str = "") -> float:
        return float(self.attacks.sum_of(self.http.get("/metrics").text, name, label))

    def touch_every_block(self) -> None:
        """Memory of the cache is the system's until it is written to: that is no growth."""
        blocks = int(self.metric("vllm:kv_blocks"))
        for start in range(0, blocks + 1, 100):
            prompt = [5 + (start + i * 7) % 500 for i in range(1600)]
            prompt[0] = 5 + start // 100
            self.load.totals.sent += 1
            answer = self.http.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            self.load.totals.statuses["2xx"] += 1
            self.load.totals.finished[answer.json()["choices"][0]["finish_reason"]] += 1

    def sample(self) -> Sample:
        gaps, self.gaps = self.gaps, []
        memory, files = {}, {}
        for name, pid in processes(self.process.pid).items():
            memory[name] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
            files[name] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        blocks = int(self.metric("vllm:kv_blocks") - self.metric("vllm:kv_blocks_free"))
        minutes = (time.monotonic() - self.started) / 60
        sample = Sample(minutes, memory, files, blocks, len(gaps), quantile(gaps, 0.5), quantile(gaps, 0.99))
        columns = [f"{minutes:6.1f} min"]
        columns += [f"{name} {memory[name] / MIB:7.1f} MiB {files[name]:3d} files" for name in memory]
        columns += [f"blocks {blocks:4d}", f"ITL p50 {1e3 * sample.gap_p50:5.1f} p99 {1e3 * sample.gap_p99:6.1f} ms"]
        columns += [f"of {sample.num_gaps}, {self.load.totals.sent} requests"]
        print("  ".join(columns), flush=True)
        return sample

    async def run(self, minutes: float, rate: float, every: float) -> None:
        running = asyncio.create_task(self.load.run(60 * minutes, rate=rate))
        while not running.done():
            await asyncio.wait((running,), timeout=every)
            self.samples.append(await asyncio.to_thread(self.sample))
        await running

    def report(self, minutes: float, at_rest: Sample, at_end: Sample) -> list[str]:
        """What is not as it should be."""
        problems = []
        warm = [sample for sample in self.samples if sample.minutes >= minutes / 6]
        times = [sample.minutes for sample in warm]
        for name in at_end.memory:
            present = [sample for sample in warm if name in sample.memory]
            hourly = 60 * slope([s.minutes for s in present], [float(s.memory[name]) for s in present])
            limit = max(8 * MIB, 0.02 * at_end.memory[name])
            print(f"slope of {name:7s} memory: {hourly / MIB:+8.2f} MiB an hour (limit {limit / MIB:.1f})")
            files = 60 * slope([s.minutes for s in present], [float(s.files[name]) for s in present])
            print(f"slope of {name:7s} files:  {files:+8.2f} an hour; {at_rest.files.get(name)} → {at_end.files[name]}")
            if hourly > limit:
                problems.append(f"memory of {name} grows by {hourly / MIB:.1f} MiB an hour")
            if at_end.files[name] > at_rest.files.get(name, at_end.files[name]):
                problems.append(f"{name} has {at_end.files[name]} files, and had {at_rest.files[name]}")
        print(f"slope of blocks in use: {60 * slope(times, [float(s.blocks) for s in warm]):+.1f} an hour")
        warm = [sample for sample in warm if sample.num_gaps]
        third = max(1, len(warm) // 3)
        for label, quantiles in (("p50", [s.gap_p50 for s in warm]), ("p99", [s.gap_p99 for s in warm])):
            first, last = quantile(quantiles[:third], 0.5), quantile(quantiles[-third:], 0.5)
            change = 100 * (last / first - 1) if first else 0.0
            print(f"ITL {label}, median of the samples: {1e3 * first:.2f} → {1e3 * last:.2f} ms ({change:+.0f} %)")
        print(self.load.totals)
        problems += self.load.totals.wrong[:20]
        problems += load_module("load").reconcile(self.load.totals, self.http.get("/metrics").text, self.attacks.sum_of)
        return problems


def start(flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "vserve.server.cli.main", "--port", "0", "--device", "cpu", "--cpu-threads", "1"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    tail: list[str] = []
    threading.Thread(target=lambda: keep_tail(process.stderr, tail), daemon=True).start()
    for line in process.stdout:
        if found := re.match(r"(http://\S+)", line):
            return process, found[1].replace("localhost", "127.0.0.1")
    raise SystemExit("the server did not start:\n" + "".join(tail))


def keep_tail(lines: Any, tail: list[str]) -> None:
    for line in lines:
        tail.append(line)
        del tail[:-50]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=2, help="requests a second")
    parser.add_argument("--every", type=float, default=30, help="seconds between two samples")
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    process, url = start(arguments.flags)
    try:
        soak = Soak(process, url)
        soak.load.learn()
        soak.touch_every_block()
        at_rest = soak.sample()
        soak.started = time.monotonic()
        asyncio.run(soak.run(arguments.minutes, arguments.rate, arguments.every))
        time.sleep(6)  # keep-alive connections of the load are closed by now, and nothing runs
        problems = soak.report(arguments.minutes, at_rest, soak.sample())
    finally:
        process.terminate()
        process.wait(60)
    for problem in problems:
        print(f"problem: {problem}")
    print("not flat" if problems else "flat")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
