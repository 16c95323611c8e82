"""/v1/conversations: items that responses go on from and add to; kept as stored responses are"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response

from ..dialects.as_chat import MAX_ITEMS
from ..dialects.pages import page
from ..dialects.pieces import Pieces
from ..dialects.responses.conversations import (
    ConversationUpdate,
    NewConversation,
    NewItems,
    conversation,
    listed,
    without,
)
from ..dialects.store import Store, Stored
from ..errors import ApiError, bad_request, shorten
from ..http.auth import owner_of
from ..http.request_id import TAG_HEADER, new_id
from ..state import ServerState
from ..wire.encoded import encode
from .ignored import ignored_headers
from .read import check_ignored, read_request, work_on_body
from .route import new_router

logger = logging.getLogger(__name__)
router = new_router()
_PATH = "/v1/conversations/{conversation_id}"
_ITEM = _PATH + "/items/{item_id}"


@router.post("/v1/conversations", response_class=Response)
async def create_conversation(request: Request) -> Response:
    """An empty conversation, or one of these items."""
    body = await read_request(NewConversation, request)
    server = ServerState.of(request)
    id, created = f"conv_{new_id(request.headers.get(TAG_HEADER))}", int(time.time())
    made = await work_on_body(request, lambda: conversation(id, created, body, server.sees(None)))
    check_ignored(request, body.ignored)
    if not server.config.response_store_size:
        raise bad_request("Conversations need a store: --response-store-size is 0.", None, "no_store")
    _check_size(server.conversations, made)
    server.conversations.put(id, owner_of(request.scope), made)
    return _json(made.answer, body.ignored)


@router.get(_PATH, response_class=Response)
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """What a conversation is called and labelled."""
    return _json(found(request, conversation_id).answer)


@router.post(_PATH, response_class=Response)
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Gives it other metadata."""
    body = await read_request(ConversationUpdate, request)
    store, stored = ServerState.of(request).conversations, found(request, conversation_id)
    renewed = store.relabel(conversation_id, owner_of(request.scope), stored, body.metadata or {})
    return _json(renewed, body.ignored)


@router.delete(_PATH, response_class=Response)
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Forgets it and its items; responses that went on from it stay."""
    if not ServerState.of(request).conversations.delete(conversation_id, owner_of(request.scope)):
        raise _not_found(conversation_id)
    return _json(encode({"id": conversation_id, "object": "conversation.deleted", "deleted": True}))


@router.get(_PATH + "/items", response_class=Response)
async def list_items(request: Request, conversation_id: str) -> Response:
    """Its items, the latest first."""
    items = found(request, conversation_id).items

    def work() -> Response:
        return _json(encode(page(items.ids(), request.query_params, "desc", items.read)))

    return await ServerState.of(request).tokenise(items.num_bytes >> 4, work)


@router.post(_PATH + "/items", response_class=Response)
async def add_items(request: Request, conversation_id: str) -> Response:
    """Adds to its end."""
    body = await read_request(NewItems, request)
    server = ServerState.of(request)
    messages, items = await work_on_body(request, lambda: body.read(server.sees(None)))
    check_ignored(request, body.ignored)
    added = await work_on_body(request, lambda: Pieces.of(items))
    if not append(server.conversations, conversation_id, owner_of(request.scope), messages, added):
        raise _not_found(conversation_id)
    return _json(await work_on_body(request, lambda: listed(items)), body.ignored)


@router.get(_ITEM, response_class=Response)
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """One item of it."""
    items = found(request, conversation_id).items

    def work() -> Response:
        if item_id not in (ids := items.ids()):
            raise _no_item(conversation_id, item_id)
        return _json(bytes(items.read([ids.index(item_id)])[0]))

    return await ServerState.of(request).tokenise(items.num_bytes >> 4, work)


@router.delete(_ITEM, response_class=Response)
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Takes one item out."""
    server, owner = ServerState.of(request), owner_of(request.scope)
    while True:
        stored = found(request, conversation_id)
        work = partial(without, stored, item_id, server.sees(None))
        renewed = await server.tokenise(stored.items.num_bytes >> 2, work)
        if renewed is None:
            raise _no_item(conversation_id, item_id)
        if server.conversations.renew(conversation_id, owner, stored, renewed):
            return _json(renewed.answer)


def found(request: Request, id: str, param: str = "conversation_id") -> Stored:
    """Raises ApiError (404)."""
    stored: Stored | None = ServerState.of(request).conversations.get(id, owner_of(request.scope))
    if stored is None:
        raise _not_found(id, param)
    return stored


def append(store: Store, id: str, owner: str, messages: Pieces, items: Pieces) -> bool:
    """Whether the conversation is still there, with these at its end. Raises ApiError (400) where it has no room."""
    while (stored := store.get(id, owner)) is not None:
        renewed = replace(stored, messages=stored.messages + messages, items=stored.items + items)
        _check_size(store, renewed)
        if store.renew(id, owner, stored, renewed):
            return True
    return False


def append_answered(store: Store, id: str, owner: str, messages: Pieces, items: Pieces) -> None:
    """What a response has said; it is there, whatever becomes of its conversation."""
    try:
        if not append(store, id, owner, messages, items):
            logger.warning("conversation %s is gone: what was said last is not in it", id)
    except ApiError as error:
        logger.warning("conversation %s: %s", id, error.message)


def _check_size(store: Store, stored: Stored) -> None:
    """Raises ApiError (400)."""
    if (num_items := len(stored.items)) > MAX_ITEMS:
        raise bad_request(
            f"The conversation would have {num_items} items; at most {MAX_ITEMS} are allowed: begin another one.",
            "items",
            "context_length_exceeded",
        )
    if stored.size > store.max_bytes:
        raise bad_request(
            f"The conversation would have {stored.size} bytes; --response-store-bytes allows {store.max_bytes}: begin "
            "another one with its latest part.",
            "items",
            "context_length_exceeded",
        )


def _not_found(id: str, param: str = "conversation_id") -> ApiError:
    return ApiError(404, f"There is no conversation `{shorten(id)}`.", param=param, code="not_found")


def _no_item(id: str, item_id: str) -> ApiError:
    message = f"The conversation `{shorten(id)}` has no item `{shorten(item_id)}`."
    return ApiError(404, message, param="item_id", code="not_found")


def _json(content: Any, ignored: list[str] | None = None) -> Response:
    return Response(content, headers=ignored_headers(ignored or []), media_type="application/json")
