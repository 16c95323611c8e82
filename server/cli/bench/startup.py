"""measure from the command to the first token, again and again"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import http.client
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ....engine.errors import ConfigError
from ....engine.options.config import EngineConfig, flag
from ...options.config import ServerConfig
from ...options.given import META
from .. import serve as serve_command
from ..flags import read_flags
from .client import Target
from .datasets import PROBE
from .event_stream import ConnectionPool, StreamResult
from .load import BenchError, write_json


@dataclass(frozen=True)
class StartUp:
    """Seconds after the command was started."""

    health: float  # /health answers 200
    first_token: float  # of a request sent right then
    phases: dict[str, float]  # as the engine counts them


EXAMPLES = (
    "vserve bench startup ./my-model --num-iters-cold 0",
    "vserve bench startup --num-iters-warm 5 --output-json found.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    for name, default, help in (
        ("--num-iters-cold", 3, "starts with the model's files out of the page cache and no compiled kernels kept"),
        ("--num-iters-warmup", 1, "warm starts that are not counted"),
        ("--num-iters-warm", 3, "starts right after another"),
        ("--start-timeout", 600, "seconds after which a start has failed"),
    ):
        group.add_argument(name, type=int, default=default, metavar="N", help=f"{help} (default: {default})")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there")
    serve_command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        _measure(arguments)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _measure(arguments: argparse.Namespace) -> None:
    engine, server = read_flags(arguments)
    if server.uds is not None:
        raise ConfigError("bench startup measures over TCP: leave --uds out")
    command = [sys.executable, "-m", "vserve.server.cli.main", "serve", engine.model, *_flags(arguments)]
    host = server.host if server.host not in ("0.0.0.0", "::") else "127.0.0.1"
    kinds: dict[str, list[StartUp]] = {"cold": [], "warm": []}

    def start(environment: dict[str, str]) -> StartUp:
        given = contextlib.nullcontext(server.port)
        with given if arguments.opt_port else _reserved_port(host) as port:
            target = Target(host, port, "/v1/completions")
            return start_once([*command, "--port", str(port)], target, environment, arguments.start_timeout)

    for i in range(arguments.num_iters_cold):
        _drop_from_page_cache(engine.model)
        with tempfile.TemporaryDirectory() as caches:
            one = start({"TRITON_CACHE_DIR": f"{caches}/triton", "CUDA_CACHE_PATH": f"{caches}/cuda"})
        kinds["cold"].append(one)
        print(f"cold start {i + 1}: first token after {one.first_token:.2f} s", file=sys.stderr)
    for _ in range(arguments.num_iters_warmup if arguments.num_iters_warm else 0):
        start({})
    for i in range(arguments.num_iters_warm):
        one = start({})
        kinds["warm"].append(one)
        print(f"warm start {i + 1}: first token after {one.first_token:.2f} s", file=sys.stderr)
    measured = {kind: starts for kind, starts in kinds.items() if starts}
    if not measured:
        raise ConfigError("--num-iters-cold and --num-iters-warm are both 0: nothing is measured")
    print_starts(measured)
    if arguments.output_json:
        write_json(
            arguments.output_json,
            {kind: [dataclasses.asdict(one) for one in starts] for kind, starts in measured.items()},
        )


def start_once(command: Sequence[str], target: Target, environment: dict[str, str], timeout: float) -> StartUp:
    """Runs a server until it has answered one request. Raises BenchError with its last words when it does not."""
    begun = time.monotonic()
    with _server(command, environment) as (process, log):

        def failed(why: str) -> BenchError:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            return BenchError(f"the server {why}: {last[0]}")

        while (status := _get_status(target)) != 200:
            if process.poll() is not None:
                raise failed(f"ended with code {process.returncode} before it was ready")
            if time.monotonic() - begun > timeout:
                raise failed(f"was not ready after {timeout:.0f} s (/health: {status or 'no answer'})")
            time.sleep(0.005)
        health = time.monotonic() - begun
        result = asyncio.run(_first_token(target))
        if result.error is not None:
            raise failed(f"did not answer the first request ({result.error})")
        try:
            return StartUp(health, result.stamps[0] - begun, _phases(target))
        except (OSError, http.client.HTTPException) as error:
            raise failed(f"did not tell its phases at /metrics ({error})") from None


async def _first_token(target: Target) -> StreamResult:
    pool = ConnectionPool(target.host, target.port, target.tls)
    result = StreamResult(0, stamps=[])
    await pool.stream(target.request({"prompt": PROBE, "max_tokens": 1, "stream": True}), result)
    pool.close()
    return result


@contextlib.contextmanager
def _server(command: Sequence[str], environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(60)  # the memory of the card must be free before the next start
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _get(target: Target, path: str, seconds: float = 5.0) -> tuple[int, str]:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=seconds)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def _get_status(target: Target) -> int | None:
    """None where nobody answers."""
    try:
        return _get(target, "/health")[0]
    except (OSError, http.client.HTTPException):
        return None


def _phases(target: Target) -> dict[str, float]:
    """From the gauge on /metrics, whatever the prefix of its name. Raises OSError, HTTPException."""
    _, page = _get(target, "/metrics", 60.0)
    found = re.findall(r'^\S*startup_phase_seconds\{[^}]*phase="([^"]*)"[^}]*\} (\S+)$', page, re.MULTILINE)
    return {phase: float(seconds) for phase, seconds in found}


def print_starts(kinds: dict[str, list[StartUp]]) -> None:
    """A table of medians, lowest and highest."""

    def line(label: str, values: Sequence[float]) -> None:
        median = f"{statistics.median(values):.2f}"
        print(f"{label:<40} {median:<8}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""))

    print(f"{' Startup Benchmark Result ':=^50}")
    for kind, starts in kinds.items():
        print(f"{f'{kind.capitalize()} starts ({len(starts)})':-^50}")
        line("Command to first token (s):", [one.first_token for one in starts])
        line("Command to /health 200 (s):", [one.health for one in starts])
        for phase in starts[0].phases:
            line(f"  {phase} (s):", [one.phases.get(phase, 0.0) for one in starts])
        line("  imports and processes (s):", [one.health - sum(one.phases.values()) for one in starts])
    print("=" * 50)


def _flags(arguments: argparse.Namespace) -> list[str]:
    """The server's options that were given, as flags again."""
    flags = [f"{flag(name)}={value}" for name in META if (value := getattr(arguments, f"opt_{name}"))]
    for config in (EngineConfig, ServerConfig):
        for spec in dataclasses.fields(config):
            value = getattr(arguments, f"opt_{spec.name}")
            if value is None or spec.name in ("model", "port"):
                continue
            if isinstance(value, bool):
                flags.append(flag(spec.name) if value else flag(f"no_{spec.name}"))
            elif isinstance(value, list):
                flags += [flag(spec.name), *value]
            else:
                flags.append(f"{flag(spec.name)}={value}")
    return flags


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """A free port, which meanwhile the kernel gives to nobody who asks for any; a server can listen on it, since both
    set SO_REUSEADDR and this socket does not listen."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        yield sock.getsockname()[1]


def _drop_from_page_cache(model: str) -> None:
    """Asks the kernel to forget the files of a model's folder: needs no rights, and does nothing to pages in use."""
    folder = Path(model)
    if not folder.is_dir():
        print(f"note: {model!r} is no folder; its files stay in the page cache", file=sys.stderr)
        return
    for path in folder.iterdir():
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages not yet written cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
