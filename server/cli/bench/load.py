"""The load on a server: client processes that start at one moment, and what they report."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from ....engine.options.cgroup import num_cores
from .arrivals import split
from .client import Done, Job, Ready, Report, Start, Target, TimedRequest

FROM_CLIENT = Ready | Done | Report


class BenchError(Exception):
    """The measurement cannot be made; the message says why, in one line."""


def measure_load(jobs: Sequence[Job], progress: bool = False) -> tuple[float, list[Report]]:
    """Runs each job in a process of its own, all from one moment on. Returns that moment (time.monotonic()) and the
    reports. Raises BenchError when a client dies."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    total = sum(len(job.requests) for job in jobs)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(_client()) for _ in jobs]
        incoming: queue.SimpleQueue[FROM_CLIENT | None] = queue.SimpleQueue()
        for client, job in zip(clients, jobs, strict=True):
            assert client.stdout is not None
            threading.Thread(target=_read, args=(client.stdout, incoming), daemon=True).start()
            _write(client, job)
        for _ in clients:
            if not isinstance(incoming.get(), Ready):
                raise BenchError("a client process ended before the start; its last words are above")
        start = time.monotonic() + 0.1  # the clients have to read it and start their event loops
        for client in clients:
            _write(client, Start(start))
        reports: list[Report] = []
        with tqdm(total=total, disable=not progress, desc="Requests", unit="req", dynamic_ncols=True) as bar:
            failed = 0
            while len(reports) < len(clients):
                message = incoming.get()
                if isinstance(message, Report):
                    reports.append(message)
                elif isinstance(message, Done):
                    if message.error is not None:
                        failed += 1
                        bar.set_postfix_str(f"{failed} failed")
                    bar.update()
                else:
                    raise BenchError("a client process ended in the middle; its last words are above")
    return start, reports


@contextlib.contextmanager
def _client() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", f"{__package__}.client"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()  # it has nothing left to say
        process.wait()


def _write(client: subprocess.Popen[bytes], message: Job | Start) -> None:
    assert client.stdin is not None
    try:
        client.stdin.write(msgspec.json.encode(message) + b"\n")
        client.stdin.flush()
    except BrokenPipeError:
        raise BenchError("a client process ended before the start; its last words are above") from None


def _read(pipe: IO[bytes], incoming: queue.SimpleQueue[FROM_CLIENT | None]) -> None:
    """On a thread of its own. A None says that nothing more comes; after a Report nobody looks at it."""
    decoder = msgspec.json.Decoder(FROM_CLIENT)
    reported = False
    try:
        for line in pipe:
            message = decoder.decode(line)
            reported = isinstance(message, Report)
            incoming.put(message)
    finally:
        if not reported:
            incoming.put(None)


def share_out(
    target: Target,
    requests: Sequence[TimedRequest],
    num_clients: int | None,
    max_concurrency: int | None,
    patience: float = 0.0,
) -> list[Job]:
    """Every client gets each n-th request and an equal share of the concurrency."""
    cores = num_cores()
    count = min(num_clients or min(4, cores), len(requests), max_concurrency or len(requests))
    shares: list[int | None] = [*split(max_concurrency, count)] if max_concurrency else [None] * count
    return [Job(target, list(requests[i::count]), share, patience) for i, share in enumerate(shares)]


def warn_of_slow_clients(reports: Sequence[Report]) -> None:
    busiest = max(report.cpu_seconds / max(report.wall_seconds, 1e-9) for report in reports)
    lag = [seconds for report in reports for seconds in report.lag]
    late = float(np.percentile(lag, 99)) if lag else 0.0
    if busiest > 0.8:
        print(f"warning: a client used {busiest:.0%} of its core and may have been the bottleneck: raise --num-clients")
    if late > 0.02:
        print(f"warning: requests left up to {late * 1000:.0f} ms late (P99): the clients had too little of the CPU")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Raises BenchError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise BenchError(f"cannot write the results to {str(path)!r} ({error}): name another file") from None
    print(f"results in {path}")
