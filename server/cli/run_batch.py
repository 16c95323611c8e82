"""answer a file of requests in OpenAI's batch format, without a server"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

import httpx

from ...engine.config import ConfigError, EngineConfig
from ..config import ServerConfig
from ..http_config import ENVIRONMENT
from ..mailbox import EngineDeadError
from .flags import add_flags, read_flags

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_SERVER_OPTIONS = (
    "served_model_name", "tokenizer", "chat_template", "generation_config", "override_generation_config",
    "strict_params", "grammar_compile_timeout", "pooling",
)  # fmt: skip


class BatchError(Exception):
    """The file of requests cannot be used. The message names the line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line; -: stdin"
    )
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="answers, as they come; -: stdout")
    group.add_argument(
        "--max-concurrency", type=int, default=1024, metavar="N", help="requests in work at once (default: 1024)"
    )
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig, only=_SERVER_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 where every request has its line of output, whatever it says; 1 where the batch could not be run."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        engine, server = read_flags(arguments)
        if arguments.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency is {arguments.max_concurrency}: it must be at least 1")
        requests = read_requests(arguments.input_file)
        with open_output(arguments.output_file) as out:
            failed = asyncio.run(answer_all(engine, server, requests, out, arguments.max_concurrency))
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    except (BatchError, EngineDeadError, OSError) as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vserve: stopped; the output has what was finished", file=sys.stderr)
        return 130
    print(f"{len(requests)} requests, {failed} of them refused or failed", file=sys.stderr)
    return 0


def read_requests(path: str) -> list[dict[str, Any]]:
    """All are checked before a model is loaded. Raises BatchError, OSError."""
    try:
        lines = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BatchError(f"{path} is not text in UTF-8 ({error})") from None
    requests: list[dict[str, Any]] = []
    ids: set[str] = set()
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            request = json.loads(line)
        except ValueError as error:
            raise BatchError(f"{where} is no JSON ({error})") from None
        if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
            raise BatchError(f"{where} has no 'custom_id', a string that its answer will carry")
        if request["custom_id"] in ids:
            raise BatchError(f"{where} has the custom_id {request['custom_id']!r} of an earlier line: choose another")
        if request.get("method", "POST") != "POST" or request.get("url") not in URLS:
            raise BatchError(f"{where}: method must be POST, and url one of {', '.join(URLS)}")
        if not isinstance(request.get("body"), dict):
            raise BatchError(f"{where} has no 'body', the object that would be posted")
        if request["body"].get("stream"):
            raise BatchError(f"{where} has 'stream': leave it out, a batch has whole answers")
        ids.add(request["custom_id"])
        requests.append(request)
    if not requests:
        raise BatchError(f"{path} has no requests")
    return requests


def open_output(path: str) -> Any:
    # What UTF-8 cannot write, half of a surrogate pair in a request's id, becomes an escape as JSON has it.
    return open(1 if path == "-" else path, "w", encoding="utf-8", errors="backslashreplace", closefd=path != "-")


async def answer_all(
    engine: EngineConfig, server: ServerConfig, requests: list[dict[str, Any]], out: IO[str], max_concurrency: int
) -> int:
    """Writes a line for each request, in the order in which they finish. Returns how many were not answered 200.

    They pass through the application itself, without a socket: what a server answers, a batch answers.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    failed = 0
    left = iter(requests)
    async with _application(engine, server) as http:
        with tqdm(total=len(requests), desc="requests", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

            async def work() -> None:
                nonlocal failed
                for request in left:
                    line = await _answer(http, request)
                    failed += line["error"] is not None or line["response"]["status_code"] != 200
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
                    out.flush()
                    bar.update(1)

            await asyncio.gather(*(work() for _ in range(min(max_concurrency, len(requests)))))
    return failed


async def _answer(http: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request["custom_id"]}
    try:
        response = await http.post(request["url"], json=request["body"])
    except Exception as error:
        return {
            **line,
            "response": None,
            "error": {"code": "server_error", "message": f"{type(error).__name__}: {error}"},
        }
    request_id = response.headers.get("x-request-id", line["id"])
    answer = {"status_code": response.status_code, "request_id": request_id, "body": response.json()}
    return {**line, "response": answer, "error": None}


@asynccontextmanager
async def _application(engine: EngineConfig, server: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    from ..app import create_app
    from ..engine_client import EngineClient
    from ..tokenizer import load_text_model
    from .progress import ProgressLine

    # The batch waits in one line: nobody is turned away.
    server = dataclasses.replace(
        server, max_num_queued_reqs=0, max_num_queued_tokens=0, access_log=False,
        api_key=(), api_key_file=None, admin_api_key=(), admin_api_key_file=None,
    )  # fmt: skip
    key = next(filter(None, (os.environ.get(name, "").strip() for name in chain(*ENVIRONMENT.values()))), "none")
    client, progress = EngineClient(engine), ProgressLine()
    client.progress_listeners.append(progress)
    try:
        await client.start()
        model = await asyncio.to_thread(load_text_model, engine.model, server, engine.revision)
        app = create_app(client, server, model)
        progress.done()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=transport,
                base_url="http://localhost",
                headers={"authorization": f"Bearer {key}"},
                timeout=None,
            ) as http,
        ):
            yield http
            if client.dead is not None:
                raise EngineDeadError(f"the engine died: {client.dead}")
    finally:
        progress.done()
        await client.close()
