"""POST /scale_data_parallel, and under vLLM's name /scale_elastic_ep: more engines or fewer, while others serve"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import Request, Response

from ..client.replicas import Replicas
from ..client.scaling import ScalingError, scale
from ..colleagues import ColleagueError
from ..errors import ApiError, bad_request
from ..http.auth import has_administrators
from ..state import ServerState
from ..wire.scaling import ElasticRequest, ScaleRequest
from .read import read_request
from .route import new_router

router = new_router()


@router.post("/scale_data_parallel", response_class=Response)
async def scale_data_parallel(request: Request) -> Response:
    """Answers when so many engines serve. Those that leave finish what they have, for `drain_timeout` at most."""
    body = await read_request(ScaleRequest, request)
    return await _scale(request, body.data_parallel_size, body.drain_timeout)


@router.post("/scale_elastic_ep", response_class=Response)
async def scale_elastic_ep(request: Request) -> Response:
    """The same, as vLLM calls it."""
    body = await read_request(ElasticRequest, request)
    return await _scale(request, body.new_data_parallel_size, body.drain_timeout)


async def _everywhere(server: ServerState, replicas: Replicas, size: int, drain_timeout: float) -> None:
    """An engine is there before other API processes look for it, and ends when none of them has anything there."""
    others = server.colleagues
    if others is None or size >= len(replicas.engines):
        await scale(replicas, size, drain_timeout)
    if others is not None:
        change = {"size": size, "drain_timeout": drain_timeout}
        await others.tell("/own/engines", change, timeout=drain_timeout + 60, wait=True)
    if others is not None and size < len(replicas.engines):
        await scale(replicas, size, drain_timeout)


async def _scale(request: Request, size: int, drain_timeout: float) -> Response:
    if not has_administrators(request.scope):  # each engine takes gigabytes
        message = "This route needs an admin API key, and this server has none: start it with --admin-api-key."
        raise ApiError(403, message, code="admin_key_required")
    server = ServerState.of(request)
    server.engine_info()  # 503 while it cannot serve
    if not isinstance(server.client, Replicas):
        raise bad_request(
            "The engine of this server runs in its own process and cannot be given others: leave out "
            "--engine-in-process.",
            "data_parallel_size",
        )
    if server.client.scaling.locked():
        raise ApiError(409, "Engines are being added or removed already.", type="conflict_error", code="scaling")
    try:
        # It goes on where the client leaves: half a change is none.
        task = asyncio.create_task(_everywhere(server, server.client, size, drain_timeout))
        server.tasks.add(task)
        task.add_done_callback(server.tasks.discard)
        await asyncio.shield(task)
    except (ScalingError, ColleagueError) as error:
        raise ApiError(500, f"{error}", type="server_error", code="scaling_failed") from None
    answer = {"message": f"Scaled to {size} data parallel engines", "data_parallel_size": size}
    return Response(msgspec.json.encode(answer), media_type="application/json")
