"""What operators ask: /version, /metrics"""

from __future__ import annotations

import msgspec
from fastapi import Request, Response

from ... import __version__
from ..state import ServerState
from .route import new_router

router = new_router()


@router.get("/version", response_class=Response)
async def version(request: Request) -> Response:
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    server = ServerState.of(request)
    if server.colleagues is not None:
        server.metrics_page.shares.others = await server.colleagues.shares()
    page, content_type = server.metrics_page.render(request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type})
