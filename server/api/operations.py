"""What operators ask: /health, /version, /metrics"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from ... import __version__
from ..state import ServerState

router = APIRouter()


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """200 and nothing when the engine can serve; otherwise 503 and why."""
    client = ServerState.of(request).client
    if client.ready and client.dead is None:
        return Response(status_code=200)
    status: dict[str, Any]
    if client.dead is not None:
        status = {"status": "dead", "error": client.dead}
    else:
        phase = client.phase
        progress = phase.done / phase.total if phase and phase.total else None
        status = {"status": "loading", "phase": phase.phase if phase else None, "progress": progress}
    return Response(msgspec.json.encode(status), 503, media_type="application/json")


@router.get("/version", response_class=Response)
async def version() -> Response:
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    page, content_type = ServerState.of(request).metrics.render(request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type})
