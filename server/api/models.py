"""GET /v1/models and /v1/models/{id}, in OpenAI's shape or, for clients that say anthropic-version, in Anthropic's"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import Request, Response

from ..errors import ANTHROPIC_HEADER, bad_request, shorten
from ..generation.tasks import GENERATE
from ..http.auth import administers
from ..state import ServerState
from .route import new_router

router = new_router()


def _shown(request: Request, server: ServerState) -> tuple[list[str], str]:
    """(The names that are listed, the model's root): where the model lies on this machine is for administrators; the
    path that was given at start stays a name all the same."""
    model, adapters = server.model, [adapter.name for adapter in server.adapters]
    if administers(request.scope) or not os.path.exists(model.root):
        return [*model.names, *adapters], model.root
    names = [name for name in model.names if name != model.root] or list(model.names)
    return names + adapters, names[0]


def _card(request: Request, server: ServerState, name: str, root: str) -> dict[str, Any]:
    """`root`: of the model. An adapter has its own, and the model as its parent."""
    parent = None
    if (adapter := server.adapters.find(name)) is not None:
        root = adapter.path if administers(request.scope) else name
        parent = adapter.parent or server.model.names[0]
    info = server.engine_info()
    generates = GENERATE in info.tasks
    permission = {
        "id": f"modelperm-{server.started}",
        "object": "model_permission",
        "created": server.started,
        "allow_create_engine": False,
        "allow_sampling": generates,
        "allow_logprobs": generates,
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
        "root": root,
        "parent": parent,
        "modalities": ["text", "image"] if server.sees(name) else ["text"],
        "max_model_len": info.max_model_len,
        "tasks": list(info.tasks),
        "permission": [permission],
    }


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _anthropic_card(server: ServerState, name: str) -> dict[str, Any]:
    longest = server.engine_info().max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(server.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": longest,
        "max_tokens": longest,
    }


def _anthropic_page(server: ServerState, names: list[str], query: Mapping[str, str]) -> dict[str, Any]:
    """Those that the query asks for, a list that is as short as the command line that named them. Raises ApiError."""
    for field in ("after_id", "before_id"):
        if (id := query.get(field)) is not None:
            if id not in names:
                raise bad_request(f"'{field}' is {shorten(id)!r}, which is not in the list of models.", field)
            at = names.index(id)
            names = names[at + 1 :] if field == "after_id" else names[:at]
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 1000):
        raise bad_request(f"'limit' is {shorten(limit)!r}; it must be from 1 to 1000.", "limit")
    shown = names[-int(limit) :] if "before_id" in query else names[: int(limit)]
    return {
        "data": [_anthropic_card(server.named(name), name) for name in shown],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": len(shown) < len(names),
    }


@router.get("/v1/models", response_class=Response)
async def list_models(request: Request) -> Response:
    server = ServerState.of(request)
    shown = [(state, *_shown(request, state)) for state in server.states]
    if ANTHROPIC_HEADER in request.headers:
        return _json(_anthropic_page(server, [name for _, names, _ in shown for name in names], request.query_params))
    return _json(
        {
            "object": "list",
            "data": [_card(request, state, name, root) for state, names, root in shown for name in names],
        }
    )


@router.get("/v1/models/{model:path}", response_class=Response)  # a name may be a path
async def retrieve_model(request: Request, model: str) -> Response:
    server = ServerState.of(request).named(model)
    name = server.model_name(model)
    _, root = _shown(request, server)
    is_anthropic = ANTHROPIC_HEADER in request.headers
    return _json(_anthropic_card(server, name) if is_anthropic else _card(request, server, name, root))
