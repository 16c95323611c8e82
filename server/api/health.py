"""/livez, /readyz, /health, /ping: the answers of probe.py, once the application is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request, Response

from ..http.probe import probe
from .route import new_router

if TYPE_CHECKING:
    from ..state import ServerState

router = new_router()


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """200 and nothing when the server takes requests; otherwise 503 and why."""
    return _answer("/health", request)


@router.get("/readyz", response_class=Response)
async def readyz(request: Request) -> Response:
    """200 and nothing when the server takes requests; otherwise 503 and why."""
    return _answer("/readyz", request)


@router.get("/livez", response_class=Response)
async def livez(request: Request) -> Response:
    """503 when only a restart from outside can help: the engine is dead for good, or it is stalled."""
    return _answer("/livez", request)


@router.api_route("/ping", methods=["GET", "POST"], response_class=Response, include_in_schema=False)
async def ping(request: Request) -> Response:
    """/health under the name that some platforms probe."""
    return _answer("/ping", request)


def _answer(path: str, request: Request) -> Response:
    server: ServerState = request.app.state.server
    return probe(path, server.client, server.draining)
