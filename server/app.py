"""The application: routes, error bodies, middleware."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from fastapi import FastAPI

from .. import __version__
from .api import (
    adapters,
    batches,
    chat,
    classify,
    compact,
    completions,
    control,
    derender,
    embeddings,
    files,
    generate,
    health,
    messages,
    models,
    operations,
    other_names,
    render,
    responses,
    scale,
    scores,
    stored_chats,
    tokens,
    ui,
)
from .api.ignored import IGNORED_HEADER
from .client.client import Client
from .client.meeting import Meeting
from .colleagues import Colleagues, Elsewhere
from .errors import add_error_handlers
from .generation import quota
from .generation.admission import Admission
from .http.auth import Authentication, Locks
from .http.body_limit import BodyLimit
from .http.middleware import Cors, HttpMetrics, RequestMiddleware, cors_options
from .http.page import load_page
from .lanes import NUM_THREADS, Lanes
from .media.pictures import Pictures
from .observe.exposition import MetricsPage
from .observe.metrics import Metrics
from .observe.request_log import RequestLog
from .observe.tracing import Tracer
from .openapi import DOCS, add_openapi
from .options.config import ServerConfig
from .state import ServerState
from .text.beside import Beside
from .text.model import TextModel


def create_app(
    client: Client,
    config: ServerConfig,
    model: TextModel,
    *,
    sources: dict[str, str] | None = None,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    beside: Beside | None = None,
    meeting: Meeting | None = None,
) -> FastAPI:
    """The server's ASGI application. `sources`: where those settings are from that are no defaults; `lifespan` runs
    around its life, in the event loop that serves; `beside`: a second model, loaded; `meeting`: of several API
    processes, of which this is one.
    """
    board = None if meeting is None else meeting.board
    metrics = Metrics(client, config)
    page = MetricsPage(metrics, client, model.names[0], config.metrics_prefix)
    http_metrics = HttpMetrics()
    page.shares.own.append(http_metrics.collect)
    request_log = RequestLog(config)
    listeners = [request_log.finished]
    tracer = None
    if config.otlp_traces_endpoint is not None:
        tracer = Tracer(config.otlp_traces_endpoint, model.names[0])
        listeners.append(tracer.finished)
    admission = Admission(client, config, metrics.rejected, metrics.timed_out, board)
    lanes = Lanes(
        config.tokenizer_threads or NUM_THREADS,
        partial(metrics.rejected, "queued_text"),
        metrics.tokenizer_queue.observe,
    )
    state = ServerState(
        client, config, model, metrics, page, http_metrics, request_log, admission, lanes, sources or {}
    )

    if (processor := model.processor) is not None:
        rejected = partial(metrics.rejected, "queued_pictures")
        state.pictures = Pictures(processor, config, rejected, metrics.picture_queue.observe)
        metrics.pictures = state.pictures
    if beside is not None:
        state.beside = _second(state, beside)

    if client.config.enable_lora:
        metrics.adapters = state.adapters_in_use

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        watching = None if board is None else asyncio.create_task(quota.watch(board))
        if state.pictures is not None:
            state.pictures.start()
        try:
            if lifespan is None:
                yield
            else:
                async with lifespan(app):
                    yield
        finally:
            for task in (*state.tasks, *([] if watching is None else [watching])):
                task.cancel()
            if "grammars" in vars(state):  # some request has asked for structured output
                await state.grammars.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            state.lanes.close()
            if state.pictures is not None:
                state.pictures.close()
            state.bodies.close()

    app = FastAPI(
        title="vserve", version=__version__, root_path=config.root_path, lifespan=run, redirect_slashes=False,
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.state.server = state
    for api in (
        chat, completions, responses, compact, messages, embeddings, classify, scores, other_names, models, health,
        operations, tokens, generate, render, derender, stored_chats, files, batches, control, scale, adapters,
    ):  # fmt: skip
        app.router.routes.extend(api.router.routes)
    if config.ui:
        app.router.routes.extend(ui.router.routes)
    add_error_handlers(app)
    if meeting is not None:
        state.colleagues = Colleagues(meeting)
        app.add_middleware(Elsewhere, colleagues=state.colleagues)
    # The last one added is the outermost: a refusal, too, has an id, is counted, and may be read by browsers.
    files_too = {"/v1/files": config.max_file_size}
    app.add_middleware(BodyLimit, limit=state.max_body_size, rejected=metrics.rejected, board=board, larger=files_too)
    pages = (*DOCS, *(load_page().paths if config.ui else ()))
    locks = Locks(config, config.root_path, pages, board)
    if locks.are_needed:
        app.add_middleware(Authentication, locks=locks)
        if config.api_key_file is not None or config.admin_api_key_file is not None:
            state.reloads["keys"] = locks.reload
    app.add_middleware(Cors, **cors_options(config, locks.need_keys, [IGNORED_HEADER]))
    app.add_middleware(RequestMiddleware, metrics=http_metrics, listeners=listeners)
    add_openapi(app)
    return app


def _second(first: ServerState, beside: Beside) -> ServerState:
    """Its own engine, queue, numbers and text; all else is the first one's."""
    metrics = Metrics(beside.client, beside.config)
    first.metrics_page.add(metrics, beside.client, beside.model.names[0])
    admission = Admission(beside.client, beside.config, metrics.rejected, metrics.timed_out)
    return dataclasses.replace(
        first,
        pictures=None,
        client=beside.client,
        config=beside.config,
        model=beside.model,
        metrics=metrics,
        admission=admission,
    )
