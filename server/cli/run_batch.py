"""answer a file of requests in OpenAI's batch format, without a server"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

import httpx
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig
from ..batches.asking import ask
from ..client.mailbox import EngineDeadError
from ..options.beside import of_first
from ..options.config import ServerConfig
from ..options.http import ENVIRONMENT
from ..wire.batch_lines import BatchError, Line, places, read_line
from .flags import add_flags, read_flags
from .given import notices, unknown_variables
from .listen import listen

EXAMPLES = (
    "vserve run-batch -i in.jsonl -o out.jsonl Qwen/Qwen3-0.6B",
    "vserve run-batch -i in.jsonl -o - --max-model-len 8K > out.jsonl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line; -: stdin"
    )
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="answers, as they come; -: stdout")
    group.add_argument(
        "--max-concurrency", type=int, default=1024, metavar="N", help="requests in work at once (default: 1024)"
    )
    group.add_argument(
        "--enable-metrics", action="store_true", help="answer GET /metrics on --host and --port while the batch runs"
    )
    group.add_argument(
        "--fail-on-error", action="store_true", help="end with code 1 where a request was refused or failed"
    )
    add_flags(parser, EngineConfig, ServerConfig)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 where every line has its line of output, whatever it says; 1 where the batch could not be run, and with
    --fail-on-error where a request failed."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        engine, server = read_flags(arguments)
        for line in (*notices(arguments), *unknown_variables()):
            print(f"vserve: {line}", file=sys.stderr)
        if arguments.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency is {arguments.max_concurrency}: it must be at least 1")
        requests = read_requests(arguments.input_file)
        sock = listen(server) if arguments.enable_metrics else None
        with open_output(arguments.output_file) as out:
            failed = asyncio.run(answer_all(engine, server, requests, out, arguments.max_concurrency, sock))
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    except (BatchError, EngineDeadError, OSError) as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vserve: stopped; the output has what was finished", file=sys.stderr)
        return 130
    named = [line.custom_id for line in requests if line.custom_id is not None]
    if (twice := len(named) - len(set(named))) > 0:
        print(
            f"vserve: {twice} lines have the custom_id of an earlier one, and answers come in any order",
            file=sys.stderr,
        )
    print(f"{len(requests)} requests, {failed} of them refused or failed", file=sys.stderr)
    return 1 if failed and arguments.fail_on_error else 0


def read_requests(path: str) -> list[Line]:
    """All are looked at before a model is loaded; a bad line costs no other. Raises BatchError, OSError."""
    text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    requests = [read_line(text[start:end], f"line {number} of {path}") for number, start, end in places(text)]
    if not requests:
        raise BatchError(f"{path} has no requests")
    return requests


def open_output(path: str) -> Any:
    # What UTF-8 cannot write, half of a surrogate pair in a request's id, becomes an escape as JSON has it.
    return open(1 if path == "-" else path, "w", encoding="utf-8", errors="backslashreplace", closefd=path != "-")


async def answer_all(
    engine: EngineConfig, server: ServerConfig, lines: list[Line], out: IO[str], max_concurrency: int,
    sock: socket.socket | None = None,
) -> int:  # fmt: skip
    """Writes a line for each line, in the order in which they finish. Returns how many were not answered 200. `sock`
    listens for those who ask for the metrics meanwhile.

    They pass through the application itself, without a socket: what a server answers, a batch answers.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    def write(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        out.flush()

    requests = [line for line in lines if line.problem is None]
    failed = len(lines) - len(requests)
    for line in lines:
        if line.problem is not None:
            write(_answer(line, error={"code": "invalid_line", "message": line.problem}))
    if not requests:
        return failed
    left = iter(requests)
    async with _application(engine, server, sock) as (http, waits):
        with tqdm(total=len(requests), desc="requests", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

            async def work() -> None:
                nonlocal failed
                for request in left:
                    answer = await _ask(http, waits, request)
                    failed += answer["error"] is not None or answer["response"]["status_code"] != 200
                    write(answer)
                    bar.update(1)

            await asyncio.gather(*(work() for _ in range(min(max_concurrency, len(requests)))))
    return failed


def _answer(line: Line, response: dict[str, Any] | None = None, error: dict[str, str] | None = None) -> dict[str, Any]:
    id = f"batch_req_{uuid.uuid4().hex}"
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}


async def _ask(http: httpx.AsyncClient, waits: Callable[[], bool], line: Line) -> dict[str, Any]:
    said = await ask(http, lambda: line, waits)
    if isinstance(said, str):
        return _answer(line, error={"code": "server_error", "message": said})
    request_id = said.headers.get("x-request-id", "")
    return _answer(line, {"status_code": said.status_code, "request_id": request_id, "body": said.json()})


@asynccontextmanager
async def _metrics(app: ASGIApp, sock: socket.socket | None) -> AsyncIterator[None]:
    """Answers GET /metrics, and nothing else, on the socket."""
    from ..http.server import Server

    if sock is None:
        yield
        return

    async def alone(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics":
            await app(scope, receive, send)
        else:
            await Response("A batch runs here: only /metrics answers.", 404)(scope, receive, send)

    server = Server(alone, last_bytes=1.0)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def _application(
    engine: EngineConfig, server: ServerConfig, sock: socket.socket | None
) -> AsyncIterator[tuple[httpx.AsyncClient, Callable[[], bool]]]:
    """What asks it, and whether its engine is on its way."""
    from ..app import create_app
    from ..client.replicas import make_client
    from ..text.beside import Beside
    from ..text.model import load_text_model
    from .progress import ProgressLine

    # The batch waits in one line: nobody is turned away.
    server = dataclasses.replace(
        server, max_num_queued_reqs=0, max_num_queued_tokens=0, access_log=False, root_path="",
        api_key=(), api_key_file=None, admin_api_key=(), admin_api_key_file=None,
    )  # fmt: skip
    key = next(filter(None, (os.environ.get(name, "").strip() for name in chain(*ENVIRONMENT.values()))), "none")
    client, beside, progress = make_client(engine), Beside.of(server, engine), ProgressLine()
    client.progress_listeners.append(progress)
    server = of_first(server)
    try:
        if beside is not None:
            await beside.start()
            await asyncio.to_thread(beside.load)
        await client.start()
        model = await asyncio.to_thread(load_text_model, engine.model, server, engine)
        app = create_app(client, server, model, beside=beside)
        await app.state.server.adapters.load_all(server.modules())
        progress.done()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            _metrics(app, sock),
            httpx.AsyncClient(
                transport=transport,
                base_url="http://localhost",
                headers={"authorization": f"Bearer {key}"},
                timeout=None,
            ) as http,
        ):
            yield http, app.state.server.waits
            if client.dead is not None:
                raise EngineDeadError(f"the engine died: {client.dead}")
    finally:
        progress.done()
        await client.close()
        if beside is not None:
            await beside.client.close()
