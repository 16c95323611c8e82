"""POST /v1/responses/compact: a conversation in short, as the items that /v1/responses goes on from."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from ..dialects.as_chat import speaking_of
from ..dialects.pieces import NONE, Pieces
from ..dialects.responses.compact_request import CompactRequest
from ..dialects.responses.compaction import compaction_item, user_items
from ..dialects.responses.events import usage
from ..dialects.responses.listed import input_items
from ..dialects.responses.request import NAMES
from ..errors import ApiError, context_length_exceeded
from ..generation.answer import Answer
from ..generation.choice import Prompt
from ..generation.generation import Generation
from ..state import ServerState
from ..wire.requests import ChatRequest
from .answer import answer
from .dialect import Chatting, Head
from .ignored import ignored_headers
from .read import check_ignored, read_request, work_on_body
from .responses import previous_response
from .route import new_router

MAX_TOKENS = 4096  # of a summary
LEAST_SHARE = 16  # of the context must be left for it: one of a few words would lose the conversation

router = new_router()


@router.post("/v1/responses/compact", response_class=Response)
async def compact(request: Request) -> Response:
    """The user's messages, and what else was said as a summary that the model writes. Nothing is stored."""
    body = await read_request(CompactRequest, request)
    previous = previous_response(request, body.previous_response_id)
    before, items = (NONE, NONE) if previous is None else (previous.messages, previous.all_items)
    body.see(ServerState.of(request).sees(body.model))
    chat = await work_on_body(request, lambda: body.chat(before.last()))
    check_ignored(request, body.ignored)
    with speaking_of(NAMES):
        return await answer(Compaction(request, body, chat, before, items))


class Compaction(Chatting):
    default_max_tokens = MAX_TOKENS

    def __init__(
        self, request: Request, asked: CompactRequest, chat: ChatRequest, before: Pieces, items: Pieces
    ) -> None:
        """`chat`: of the input and the last message `before` it; `items`: those of `before`."""
        super().__init__(request, chat)
        self._asked = asked
        self._before = before
        self._items = items

    def conversation(self) -> list[dict[str, Any]]:
        if not self._before.texts:
            return self.body.messages
        messages: list[dict[str, Any]] = self._asked.chat(list(self._before.entries())).messages
        return messages

    async def prompts(self) -> Sequence[Prompt]:
        (prompt,) = prompts = await super().prompts()
        limit, num_tokens = self.server.engine_info().max_model_len, len(prompt.token_ids)
        least = min(MAX_TOKENS, max(1, limit // LEAST_SHARE))
        if num_tokens + least > limit:
            raise context_length_exceeded(limit, num_tokens, least, "messages")
        return prompts

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        (said,) = answers
        summary = said.text.strip()  # without what it thought
        if not summary or said.choice.stop_reason == "abort":
            why = "The summary was cancelled" if summary else "The model wrote no summary"
            raise ApiError(422, f"{why}: go on with the conversation as it is, or ask again.", code="no_summary")
        digits = uuid.uuid4().hex
        items = list(self._items.entries())
        items += input_items(self._asked.input or [], digits, len(items))
        return {
            "id": f"resp_{digits}",
            "object": "response.compaction",
            "created_at": head.created,
            "output": [*user_items(items), compaction_item(f"cmp_{digits}", summary)],
            "usage": usage(generation),
        }

    def slowness(self, answers: Sequence[Answer]) -> int:
        return (self.request.state.body_size + self._items.num_bytes) >> 4  # to decode and to encode is as much faster

    @property
    def headers(self) -> Mapping[str, str]:
        return ignored_headers(self._asked.ignored)
