"""A client process: `python -m vserve.server.cli.bench.client`. A job on stdin, results on stdout, as JSON lines."""

from __future__ import annotations

import asyncio
import gc
import io
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from .event_stream import ConnectionPool, StreamResult


class Target(msgspec.Struct):
    """Where requests go."""

    host: str
    port: int
    path: str
    tls: bool = False
    headers: dict[str, str] = {}

    def request(self, body: dict[str, Any]) -> bytes:
        """The bytes of a POST."""
        content = msgspec.json.encode(body)
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = [f"POST {self.path} HTTP/1.1", f"host: {host}:{self.port}", "content-type: application/json",
                f"content-length: {len(content)}", "accept: text/event-stream",
                *(f"{name}: {value}" for name, value in self.headers.items())]  # fmt: skip
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + content


class TimedRequest(msgspec.Struct):
    index: int
    arrival: float  # seconds after the common start
    body: dict[str, Any]


class Job(msgspec.Struct):
    """A client's share of the load."""

    target: Target
    requests: list[TimedRequest]  # by arrival
    max_concurrency: int | None = None
    patience: float = 0.0  # seconds in which a request that a busy server refuses is sent again when it says


class Start(msgspec.Struct):
    """Sent to all clients when all are ready; time.monotonic() is one clock for all processes of a host."""

    at: float


class Ready(msgspec.Struct, tag="ready"):
    """Every request is encoded."""


class Done(msgspec.Struct, tag="done"):
    """One request is finished."""

    error: str | None = None


class Report(msgspec.Struct, tag="report"):
    results: list[StreamResult]
    cpu_seconds: float  # of this process since the start
    wall_seconds: float
    lag: list[float]  # seconds between a request's arrival and its being sent, where nothing but this process delays it


async def run_job(job: Job, start: float, on_done: Callable[[StreamResult], None]) -> Report:
    """Sends every request at `start` + its arrival, at most max_concurrency at a time, in order."""
    pool = ConnectionPool(job.target.host, job.target.port, job.target.tls)
    prepared = [(request.arrival, job.target.request(request.body)) for request in job.requests]
    results = [StreamResult(request.index, stamps=[]) for request in job.requests]
    slots = asyncio.Semaphore(job.max_concurrency) if job.max_concurrency else None
    lag = []

    async def one(data: bytes, result: StreamResult) -> None:
        try:
            await pool.insist(data, result, job.patience)
        finally:
            if slots is not None:
                slots.release()
        on_done(result)

    tasks = []
    await _sleep_until(start)
    cpu, wall = time.process_time(), time.monotonic()
    for (arrival, data), result in zip(prepared, results, strict=True):
        await _sleep_until(start + arrival)
        if slots is not None:
            await slots.acquire()
        elif arrival > 0:
            lag.append(time.monotonic() - start - arrival)
        tasks.append(asyncio.create_task(one(data, result)))
    await asyncio.gather(*tasks)
    pool.close()
    return Report(results, time.process_time() - cpu, time.monotonic() - wall, lag)


async def _sleep_until(moment: float) -> None:
    if (delay := moment - time.monotonic()) > 0:
        await asyncio.sleep(delay)


def run_fast(main: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def main() -> None:
    # Not sys.stdout.buffer: under PYTHONUNBUFFERED it is a bare file that may write part of a line and say so.
    out = io.BufferedWriter(io.FileIO(sys.stdout.fileno(), "wb", closefd=False))

    def say(message: Ready | Done | Report) -> None:
        out.write(msgspec.json.encode(message) + b"\n")
        out.flush()

    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    say(Ready())
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the other end is gone
    start = msgspec.json.decode(line, type=Start).at
    gc.collect()
    gc.disable()  # nothing here makes cycles, and a pause would be counted as the server's
    say(run_fast(run_job(job, start, lambda result: say(Done(result.error)))))


if __name__ == "__main__":
    main()
