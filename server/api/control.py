"""GET /load, /server_info, POST /reload, /v1/requests/{id}/cancel, /abort_request: for those who run the server"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from fastapi import Request, Response

from ...engine.errors import ConfigError
from ...engine.link.messages import HISTORY
from ..colleagues import ColleagueError
from ..errors import ApiError, bad_request, engine_silent, shorten
from ..http.auth import controls
from ..state import ServerState
from ..wire.tokens import AbortRequest
from .read import read_request
from .route import new_router
from .settings import server_info

router = new_router()


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


@router.get("/load", response_class=Response)
async def load(request: Request) -> Response:
    """How many requests are being answered."""
    return _json({"server_load": sum(not generation.closed for generation in ServerState.of(request).generations)})


@router.get("/server_info", response_class=Response)
async def info(request: Request) -> Response:
    """Every setting in effect, and where it is from; with `?steps=100`, also what the engine's last 100 steps did."""
    server, count = ServerState.of(request), _num_steps(request)
    content = server_info(server)
    if count:
        try:
            steps = await server.client.last_steps(count)
        except TimeoutError:
            raise engine_silent() from None
        content["steps"] = [msgspec.structs.asdict(step) for step in steps]
    return _json(content)


def _num_steps(request: Request) -> int:
    """How many of the engine's last steps are asked for; 0 where none are. Raises ApiError (400)."""
    given = request.query_params.getlist("steps")
    if not given:
        return 0
    if len(given) > 1 or not re.fullmatch("[1-9][0-9]{0,3}", given[0]) or int(given[0]) > HISTORY:
        raise bad_request(f"steps is {shorten(', '.join(given))}; ask for 1 to {HISTORY} of the last steps.", "steps")
    return int(given[0])


@router.post("/reload", response_class=Response)
async def reload(request: Request) -> Response:
    """Reads the files of keys and certificates again: requests and connections from now on meet the new ones."""
    try:
        server = ServerState.of(request)
        answer = _json({"reloaded": server.reload()})
        if server.colleagues is not None:
            await server.colleagues.tell("/own/reload")
        return answer
    except ConfigError as error:
        message = f"{error}; what this is about stays as it was."
        raise ApiError(500, message, type="server_error", code="reload_failed") from None
    except ColleagueError as error:
        raise ApiError(500, str(error), type="server_error", code="reload_failed") from None


@router.post("/v1/requests/{request_id}/cancel", response_class=Response)
async def cancel_request(request: Request, request_id: str) -> Response:
    """Ends an answer: its reader gets what there is, with the finish reason "stop" and the stop reason "abort"."""
    return _cancel(request, request_id)


@router.post("/abort_request", response_class=Response)
async def abort_request(request: Request) -> Response:
    """The same, with the id in the body."""
    body = await read_request(AbortRequest, request)
    return _cancel(request, body.request_id)


def _cancel(request: Request, id: str) -> Response:
    """What another key has begun is not there."""
    # as in the header x-request-id, or as in the answer's body
    names = {id, *(id.removeprefix(prefix) for prefix in ("chatcmpl-", "cmpl-", "msg_"))}
    found = [
        generation
        for generation, (request_id, owner) in ServerState.of(request).generations.items()
        if request_id in names and not generation.closed and controls(request.scope, owner)
    ]
    if not found:
        message = f"No request with the id `{shorten(id)}` is being answered."
        raise ApiError(404, message, param="request_id", code="request_not_found")
    for generation in found:
        generation.cancel()
    return _json({"id": id, "object": "request.cancelled", "cancelled": len(found)})
