"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from ..dialects.as_chat import speaking_of
from ..dialects.messages_events import Limits, MessageEvents
from ..dialects.messages_request import NAMES, CountRequest, MessagesRequest
from ..generation import Generation
from ..speech import Speech
from ..state import ServerState
from ..validation import read_request
from .answer import IGNORED_HEADER, Answer, Head, header_list, respond, told
from .route import new_router
from .tokens import chat_tokens

router = new_router()


@router.post("/v1/messages", response_class=Response)
async def create_message(request: Request) -> Response:
    """An answer to messages: text, thinking and tool use."""
    body = await read_request(MessagesRequest, request)
    server = ServerState.of(request)
    chat = body.chat()

    async def tokenise() -> list[list[int]]:
        _, token_ids = await chat_tokens(request, chat, chat.messages)
        return [token_ids]

    def events(generation: Generation, head: Head) -> MessageEvents:
        limits = Limits(body.max_tokens, server.client.info.max_model_len, tuple(chat.stop or ()))
        return MessageEvents(generation, head.id, head.model, limits)

    def full(generation: Generation, answers: list[Answer], head: Head) -> dict[str, Any]:
        return told(events(generation, head), answers).message

    with speaking_of(NAMES):
        response = await respond(
            request,
            chat,
            id_prefix="msg_",
            tokenise=tokenise,
            echo=None,
            default_max_tokens=body.max_tokens,
            chunks=events,
            full=full,
            speech=Speech.of(chat, server.model),
        )
    response.headers["request-id"] = request.state.request_id  # where Anthropic's SDKs look for it
    if body.ignored:
        response.headers[IGNORED_HEADER] = header_list(body.ignored)
    return response


@router.post("/v1/messages/count_tokens", response_class=Response)
async def count_tokens(request: Request) -> Response:
    """How many tokens the messages are; nothing is generated."""
    body = await read_request(CountRequest, request)
    server = ServerState.of(request)
    server.model_name(body.model)
    with speaking_of(NAMES):
        chat = body.chat()
        _, token_ids = await chat_tokens(request, chat, chat.messages)
    headers = {IGNORED_HEADER: header_list(body.ignored)} if body.ignored else {}
    content = msgspec.json.encode({"input_tokens": len(token_ids)})
    return Response(content, headers=headers, media_type="application/json")
