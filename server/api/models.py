"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from ..state import ServerState
from .route import new_router

router = new_router()


def _card(server: ServerState, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{server.started}",
        "object": "model_permission",
        "created": server.started,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "vserve",
        "root": server.model.root,
        "parent": None,
        "max_model_len": server.engine_info().max_model_len,
        "permission": [permission],
    }


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


@router.get("/v1/models", response_class=Response)
async def list_models(request: Request) -> Response:
    server = ServerState.of(request)
    return _json({"object": "list", "data": [_card(server, name) for name in server.model.names]})


@router.get("/v1/models/{model:path}", response_class=Response)  # a name may be a path
async def retrieve_model(request: Request, model: str) -> Response:
    server = ServerState.of(request)
    return _json(_card(server, server.model_name(model)))
