"""POST and GET /v1/batches, GET /v1/batches/{batch_id}, POST /v1/batches/{batch_id}/cancel"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import httpx
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from ..batches.asking import PAUSE
from ..batches.batch import Batch, Places, Work
from ..dialects.pages import newest
from ..errors import ApiError, bad_request, shorten
from ..http.auth import owner_of, presented_key
from ..http.hops import TENANT
from ..http.request_id import TAG_HEADER, new_id
from ..http.tenant import tenant_of
from ..state import ServerState
from ..wire.batches import BatchRequest
from .files import files
from .read import on_bodies, read_request
from .route import new_router
from .tokens import json_answer

router = new_router()
_PATH = "/v1/batches/{batch_id}"
BYTES = 16  # of a file that are judged in the time that tokenising a character takes


@router.post("/v1/batches", response_class=Response)
async def create_batch(request: Request) -> Response:
    """Answers the requests of a file while its client does something else."""
    body = await read_request(BatchRequest, request)
    server, owner, store = ServerState.of(request), owner_of(request.scope), files(request)
    server.engine_info()
    file = store.get(body.input_file_id, owner, "input_file_id")
    if file.purpose != "batch":
        message = f"The file `{shorten(file.id)}` has answers: upload one of requests, with the purpose batch."
        raise bad_request(message, "input_file_id")
    tag = request.headers.get(TAG_HEADER)
    batch = Batch(
        f"batch_{new_id(tag)}", owner, file, body.endpoint, body.metadata or {}, lambda: f"file-{new_id(tag)}"
    )
    config = server.config

    async def aside(size: int, judge: Callable[[], Places]) -> Places:
        while True:
            with contextlib.suppress(ApiError):  # too much is to be read now
                return await on_bodies(request, size // BYTES, judge)
            await asyncio.sleep(PAUSE)

    client, turns = _client(request), server.batches.turns
    work = Work(client, server.waits, store, turns, config.batch_concurrency, config.max_batch_requests, aside)
    task = server.batches.begin(batch, work)
    server.tasks.add(task)
    task.add_done_callback(server.tasks.discard)
    return json_answer(body.ignored, batch.answer())


def _client(request: Request) -> httpx.AsyncClient:
    """Asks this application as who has sent the request: with its key, and as the same tenant."""
    key, tenant = presented_key(request.scope["headers"]), b"%d" % tenant_of(request.scope)

    async def as_tenant(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"forwarded": True}  # what the header says is this process's word
        scope["headers"] = [*scope["headers"], (TENANT, tenant)]
        await request.app(scope, receive, send)

    transport = httpx.ASGITransport(as_tenant, raise_app_exceptions=False)
    headers = {} if key is None else {b"authorization": b"Bearer " + key}
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=None)


@router.get("/v1/batches", response_class=Response)
async def list_batches(request: Request) -> Response:
    """Those of the key that asks, the newest first."""
    files(request)
    found = ServerState.of(request).batches.of(owner_of(request.scope))
    return json_answer([], newest(found, request.query_params))


@router.get(_PATH, response_class=Response)
async def get_batch(request: Request, batch_id: str) -> Response:
    """How far a batch is."""
    return json_answer([], _found(request, batch_id).answer())


@router.post(_PATH + "/cancel", response_class=Response)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ends a batch; what was answered stays."""
    batch = _found(request, batch_id)
    if batch.has_ended and batch.status != "cancelled":
        message = f"The batch `{shorten(batch_id)}` has ended ({batch.status}): there is nothing to cancel."
        raise bad_request(message, "batch_id")
    batch.cancel()
    return json_answer([], batch.answer())


def _found(request: Request, id: str) -> Batch:
    files(request)
    return ServerState.of(request).batches.get(id, owner_of(request.scope))
