"""GET / and /ui/…: the page, and the events that its view of the engine lives on"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec
from fastapi import HTTPException, Request, Response

from ... import __version__
from ...engine.messages import StepReports
from ..errors import bad_request, shorten
from ..http.event_stream import EventStream
from ..http.page import load_page
from ..state import ServerState
from .route import new_router

router = new_router()

MAX_BEHIND = 20  # messages that a slow reader may be behind; beyond them it loses the oldest
LOOK_UP = 0.5  # seconds after which an idle stream notices that the server is shutting down
SILENCE = 10.0  # seconds after which it says something, so that a reader that has left is noticed


class Watcher:
    """One open page. The engine reports its steps only while there is one."""

    def __init__(self, server: ServerState, engine: int | None) -> None:
        """`engine`: the number of the one that is looked at; None: the first that serves."""
        self._server = server
        engines = server.client.engines
        first = next((index for index, one in enumerate(engines) if one.ready), 0)
        self._engine = first if engine is None else engine
        self._reports: deque[StepReports] = deque(maxlen=MAX_BEHIND)
        self._news = asyncio.Event()
        engines[self._engine].watch_steps(self._put)

    def _put(self, reports: StepReports) -> None:
        self._reports.append(reports)
        self._news.set()

    def close(self) -> None:
        self._server.client.unwatch_steps(self._put)

    async def events(self) -> AsyncIterator[bytes]:
        yield b"event: hello\ndata: " + msgspec.json.encode(_hello(self._server, self._engine)) + b"\n\n"
        silence = 0.0
        # An open page must not keep a server that drains: it can come back.
        while not self._server.draining and self._server.client.dead is None:
            if self._reports:
                silence = 0.0
                reports = self._reports.popleft()
                yield b"event: steps\ndata: " + msgspec.json.encode((reports.steps, reports.blocks)) + b"\n\n"
                continue
            self._news.clear()
            try:
                async with asyncio.timeout(LOOK_UP):
                    await self._news.wait()
            except TimeoutError:
                silence += LOOK_UP
                if silence >= SILENCE:
                    silence = 0.0
                    yield b": idle\n\n"


def _hello(server: ServerState, engine: int) -> dict[str, object]:
    """What the numbers that follow are to be measured against; `num_blocks` are those of the engine that is shown."""
    info, engines = server.engine_info(), server.client.engines
    shown = engines[engine].info if engine < len(engines) and hasattr(engines[engine], "info") else info
    return {
        "engine": engine,
        "version": __version__,
        "model": server.model.names[0],
        "metrics_prefix": server.config.metrics_prefix,
        "device": info.device,
        "dtype": info.dtype,
        "block_size": info.block_size,
        "num_blocks": shown.num_blocks,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "enable_prefix_caching": info.enable_prefix_caching,
    }


@router.get("/ui/events", response_class=Response, include_in_schema=False)
async def events(request: Request) -> Response:
    """What the engine does, step by step, as it happens."""
    server = ServerState.of(request)
    server.engine_info()  # 503 while it cannot serve
    asked, num_engines = request.query_params.get("engine"), len(server.client.engines)
    if asked is not None and not (asked.isascii() and asked.isdigit() and int(asked[:9]) < num_engines):
        raise bad_request(f"engine is {shorten(asked)!r}, and the engines here are 0 to {num_engines - 1}.", "engine")
    watcher = Watcher(server, None if asked is None else int(asked))
    return EventStream(watcher.events(), watcher.close, {}, ping=0)


@router.api_route("/", methods=["GET", "HEAD"], response_class=Response, include_in_schema=False)
async def page(request: Request) -> Response:
    return _file("/", request)


@router.api_route("/ui/{name:path}", methods=["GET", "HEAD"], response_class=Response, include_in_schema=False)
async def file(request: Request, name: str) -> Response:
    return _file(f"/ui/{name}", request)


def _file(path: str, request: Request) -> Response:
    answer = load_page().answer(path, request.headers)
    if answer is None:
        raise HTTPException(404)
    return answer
