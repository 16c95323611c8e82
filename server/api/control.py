"""GET /load, /server_info, POST /v1/requests/{id}/cancel, /abort_request: for those who run the server"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from ..errors import ApiError, shorten
from ..settings import server_info
from ..state import ServerState
from ..token_protocol import AbortRequest
from ..validation import read_request
from .route import new_router

router = new_router()


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


@router.get("/load", response_class=Response)
async def load(request: Request) -> Response:
    """How many requests are being answered."""
    return _json({"server_load": sum(not generation.closed for generation in ServerState.of(request).generations)})


@router.get("/server_info", response_class=Response)
async def info(request: Request) -> Response:
    """Every setting in effect, and where it is from."""
    return _json(server_info(ServerState.of(request)))


@router.post("/v1/requests/{request_id}/cancel", response_class=Response)
async def cancel_request(request: Request, request_id: str) -> Response:
    """Ends an answer: its reader gets what there is, with the finish reason "stop" and the stop reason "abort"."""
    return _cancel(ServerState.of(request), request_id)


@router.post("/abort_request", response_class=Response)
async def abort_request(request: Request) -> Response:
    """The same, with the id in the body."""
    body = await read_request(AbortRequest, request)
    return _cancel(ServerState.of(request), body.request_id)


def _cancel(server: ServerState, id: str) -> Response:
    # as in the header x-request-id, or as in the answer's body
    names = {id, *(id.removeprefix(prefix) for prefix in ("chatcmpl-", "cmpl-", "msg_"))}
    found = [
        generation
        for generation, request_id in server.generations.items()
        if request_id in names and not generation.closed
    ]
    if not found:
        message = f"No request with the id `{shorten(id)}` is being answered."
        raise ApiError(404, message, param="request_id", code="request_not_found")
    for generation in found:
        generation.cancel()
    return _json({"id": id, "object": "request.cancelled", "cancelled": len(found)})
