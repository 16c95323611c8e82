"""Chats that were told to be stored: list, GET, POST (their metadata), DELETE, messages"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response

from ..dialects.pages import page
from ..dialects.store import Store, Stored
from ..errors import ApiError, shorten
from ..http.auth import owner_of
from ..state import ServerState
from ..wire.encoded import encode
from ..wire.stored_chats import ChatUpdate
from .ignored import ignored_headers
from .read import read_request
from .route import new_router

router = new_router()
_PATH = "/v1/chat/completions/{completion_id}"


@router.get("/v1/chat/completions", response_class=Response)
async def list_chats(request: Request) -> Response:
    """The stored ones, the oldest first; of a `model`, or with some metadata (`metadata[topic]=news`)."""
    query = request.query_params
    model = query.get("model")
    labels = {name[9:-1]: text for name, text in query.items() if name.startswith("metadata[") and name.endswith("]")}
    stored = [
        (id, one)
        for id, one in sorted(_store(request).all_of(owner_of(request.scope)), key=lambda pair: pair[1].number)
        if model in (None, one.model) and labels.items() <= one.metadata.items()
    ]
    listed = page([id for id, _ in stored], query, "asc", lambda places: [stored[place][1].answer for place in places])
    size = sum(map(len, listed["data"]))
    listed["data"] = list(map(msgspec.Raw, listed["data"]))
    return await ServerState.of(request).tokenise(size >> 4, lambda: _json(listed))


@router.get(_PATH, response_class=Response)
async def get_chat(request: Request, completion_id: str) -> Response:
    """A stored chat completion."""
    return Response(_found(request, completion_id).answer, media_type="application/json")


@router.post(_PATH, response_class=Response)
async def update_chat(request: Request, completion_id: str) -> Response:
    """Gives a stored chat completion other metadata."""
    body = await read_request(ChatUpdate, request)
    stored = _found(request, completion_id)
    store, owner, labels = _store(request), owner_of(request.scope), body.metadata or {}
    work = partial(store.relabel, completion_id, owner, stored, labels)
    renewed = await ServerState.of(request).tokenise(len(stored.answer) >> 4, work)
    return Response(renewed, headers=ignored_headers(body.ignored), media_type="application/json")


@router.delete(_PATH, response_class=Response)
async def delete_chat(request: Request, completion_id: str) -> Response:
    """Forgets a stored chat completion."""
    if not _store(request).delete(completion_id, owner_of(request.scope)):
        raise _not_found(completion_id)
    return _json({"object": "chat.completion.deleted", "id": completion_id, "deleted": True})


@router.get(_PATH + "/messages", response_class=Response)
async def list_messages(request: Request, completion_id: str) -> Response:
    """The messages that a stored chat completion answers, the oldest first."""
    stored = _found(request, completion_id)

    def listed() -> Response:
        ids = [f"{completion_id}-{i}" for i in range(len(stored.messages))]

        def read(places: Sequence[int]) -> list[dict[str, Any]]:
            entries = zip(places, stored.messages.read(places), strict=True)
            return [{"content_parts": None, **msgspec.json.decode(one), "id": ids[place]} for place, one in entries]

        return _json(page(ids, request.query_params, "asc", read))

    return await ServerState.of(request).tokenise(stored.messages.num_bytes >> 4, listed)


def _store(request: Request) -> Store:
    return ServerState.of(request).chats


def _found(request: Request, id: str) -> Stored:
    stored: Stored | None = _store(request).get(id, owner_of(request.scope))
    if stored is None:
        raise _not_found(id)
    return stored


def _not_found(id: str) -> ApiError:
    message = f"There is no stored chat completion `{shorten(id)}`: 'store': true keeps one."
    return ApiError(404, message, param="completion_id", code="not_found")


def _json(content: Any) -> Response:
    return Response(encode(content), media_type="application/json")
