"""The application: routes, error bodies, middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from .. import __version__
from .api import chat, completions, models, operations
from .config import ServerConfig
from .errors import add_error_handlers
from .generation import Client
from .metrics import Metrics
from .middleware import HttpMetrics, RequestMiddleware
from .protocol import ChatRequest, CompletionRequest
from .state import ServerState
from .tokenizer import TextModel

REQUESTS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}


def create_app(
    client: Client,
    config: ServerConfig,
    model: TextModel,
    *,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """The server's ASGI application. `lifespan` runs around its life, in the event loop that serves."""
    metrics = Metrics(client, model.names[0], config.metrics_prefix)
    http_metrics = HttpMetrics()
    metrics.registry.register(http_metrics)
    state = ServerState(client, config, model, metrics, http_metrics)

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        try:
            if lifespan is None:
                yield
            else:
                async with lifespan(app):
                    yield
        finally:
            state.threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="vserve", version=__version__, root_path=config.root_path, lifespan=run)
    app.state.server = state
    for api in (chat, completions, models, operations):
        app.include_router(api.router)
    add_error_handlers(app)
    app.add_middleware(RequestMiddleware, metrics=http_metrics)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the request bodies in it, which the handlers read themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema(
            [(ChatRequest, "validation"), (CompletionRequest, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        for path, request in REQUESTS.items():
            reference = {"$ref": f"#/components/schemas/{request.__name__}"}
            document["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
        app.openapi_schema = document
    return app.openapi_schema
