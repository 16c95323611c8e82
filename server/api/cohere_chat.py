"""POST /v2/chat, as Cohere's clients speak"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from ..dialects.as_chat import speaking_of
from ..dialects.cohere.events import CohereEvents
from ..dialects.cohere.request import NAMES, CohereChatRequest
from ..dialects.events import told
from ..generation.answer import Answer
from ..generation.generation import Generation
from ..wire.requests import ChatRequest
from .answer import answer
from .dialect import Chatting, Head
from .ignored import ignored_headers
from .read import check_ignored, read_request, work_on_body
from .route import new_router

router = new_router()


@router.post("/v2/chat", response_class=Response)
async def cohere_chat(request: Request) -> Response:
    """An answer to messages: text, thinking and tool calls, without citations."""
    body = await read_request(CohereChatRequest, request)
    with speaking_of(NAMES):
        chat = await work_on_body(request, body.chat)
        check_ignored(request, body.ignored)
        return await answer(CohereChat(request, body, chat))


class CohereChat(Chatting):
    def __init__(self, request: Request, asked: CohereChatRequest, chat: ChatRequest) -> None:
        super().__init__(request, chat)
        self._asked = asked

    def events(self, generation: Generation, head: Head) -> CohereEvents:
        tokenizer = self.server.model.tokenizer
        return CohereEvents(generation, tokenizer, head.id, logprobs=bool(self._asked.logprobs))

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return told(self.events(generation, head), answers).answer

    @property
    def headers(self) -> Mapping[str, str]:
        return ignored_headers(self._asked.ignored)
