"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from ..dialects.as_chat import speaking_of
from ..dialects.events import told
from ..dialects.messages.events import Limits, MessageEvents
from ..dialects.messages.request import NAMES, CountRequest, MessagesRequest
from ..generation.answer import Answer
from ..generation.generation import Generation
from ..http.disconnect import unless_disconnected
from ..state import ServerState
from ..wire.requests import ChatRequest
from .answer import answer
from .dialect import Chatting, Head
from .ignored import ignored_headers
from .read import check_ignored, read_request, work_on_body
from .route import new_router
from .tokens import chat_tokens

router = new_router()


@router.post("/v1/messages", response_class=Response)
async def create_message(request: Request) -> Response:
    """An answer to messages: text, thinking and tool use."""
    body = await read_request(MessagesRequest, request)
    body.see(ServerState.of(request).sees(body.model))
    chat = await work_on_body(request, body.chat)
    check_ignored(request, body.ignored)
    with speaking_of(NAMES):
        return await answer(Message(request, body, chat))


class Message(Chatting):
    id_prefix = "msg_"

    def __init__(self, request: Request, asked: MessagesRequest, chat: ChatRequest) -> None:
        super().__init__(request, chat)
        self._asked = asked
        self.default_max_tokens = asked.max_tokens

    def events(self, generation: Generation, head: Head) -> MessageEvents:
        limits = Limits(self._asked.max_tokens, self.server.client.info.max_model_len, tuple(self.body.stop or ()))
        return MessageEvents(generation, head.id, head.model, limits)

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return told(self.events(generation, head), answers).message

    @property
    def headers(self) -> Mapping[str, str]:
        # where Anthropic's SDKs look for it
        return {**ignored_headers(self._asked.ignored), "request-id": self.request.state.request_id}


@router.post("/v1/messages/count_tokens", response_class=Response)
async def count_tokens(request: Request) -> Response:
    """How many tokens the messages are; nothing is generated."""
    body = await read_request(CountRequest, request)
    ServerState.of(request).model_name(body.model)
    body.see(ServerState.of(request).sees(body.model))
    with speaking_of(NAMES):
        chat = await work_on_body(request, body.chat)
        check_ignored(request, body.ignored)
        work = chat_tokens(request, chat, fits=False)
        prompt = await unless_disconnected(request.receive, work)
    content = msgspec.json.encode({"input_tokens": len(prompt.token_ids)})
    return Response(content, headers=ignored_headers(body.ignored), media_type="application/json")
