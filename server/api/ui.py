"""GET / and /ui/…: the page, and the events that its view of the engine lives on"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from fastapi import HTTPException, Request, Response

from ... import __version__
from ..errors import bad_request, shorten
from ..http.event_stream import EventStream
from ..http.page import load_page
from ..http.tenant import tenant_of
from ..observe.step_feeds import Watcher
from ..state import ServerState
from .route import new_router

router = new_router()

LOOK_UP = 0.5  # seconds after which an idle stream notices that the server is shutting down
SILENCE = 10.0  # seconds after which it says something, so that a reader that has left is noticed


async def _events(server: ServerState, engine: int, watcher: Watcher) -> AsyncIterator[bytes]:
    yield b"event: hello\ndata: " + msgspec.json.encode(_hello(server, engine)) + b"\n\n"
    silence = 0.0
    # An open page must not keep a server that drains: it can come back.
    while not server.draining and server.client.dead is None:
        if (event := await watcher.next(LOOK_UP)) is not None:
            silence = 0.0
            yield event
        elif (silence := silence + LOOK_UP) >= SILENCE:
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
    asked, engines = request.query_params.get("engine"), server.client.engines
    if asked is None:
        shown = next((index for index, one in enumerate(engines) if one.ready), 0)
    elif asked.isascii() and asked.isdigit() and int(asked[:9]) < len(engines):
        shown = int(asked)
    else:
        raise bad_request(f"engine is {shorten(asked)!r}, and the engines here are 0 to {len(engines) - 1}.", "engine")
    owner = str(tenant_of(request.scope))
    watcher = server.step_feeds.open(engines[shown], owner)
    return EventStream(_events(server, shown, watcher), lambda: server.step_feeds.close(watcher), {}, ping=0)


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
