"""POST /v1/chat/completions and /v1/chat/completions/batch"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from ..colleagues import ColleagueError
from ..dialects.chat import ChatChunks, choices
from ..dialects.events import Events
from ..dialects.pieces import NONE, Pieces
from ..dialects.recorded import Recorded
from ..dialects.store import Stored
from ..generation import timing
from ..generation.answer import Answer
from ..generation.generation import Generation
from ..http.auth import owner_of
from ..wire.chat_batch import ChatBatch
from ..wire.requests import ChatRequest
from .answer import answer
from .dialect import Chatting, Head, Load
from .read import read_request
from .route import new_router
from .tokens import chat_tokens

logger = logging.getLogger(__name__)

router = new_router()


@router.post("/v1/chat/completions", response_class=Response)
async def chat_completions(request: Request) -> Response:
    return await answer(ChatCompletion(request, await read_request(ChatRequest, request)))


@router.post("/v1/chat/completions/batch", response_class=Response)
async def chat_completions_batch(request: Request) -> Response:
    """Several conversations, each answered by the choice of its index."""
    return await answer(ChatCompletionBatch(request, await read_request(ChatBatch, request)))


class ChatCompletion(Chatting):
    id_prefix = "chatcmpl-"
    _asked = NONE  # the messages, where they are to be stored
    _elsewhere: bytes | None = None  # what the first API process is to store

    async def tokens(self) -> list[list[int]]:
        if self.body.store:
            size = self.request.state.body_size >> 4
            self._asked = await self.server.tokenise(size, lambda: Pieces.of(self.body.messages))
        return await super().tokens()

    @property
    def keeps_answer(self) -> bool:
        return super().keeps_answer or bool(self.body.store)

    def events(self, generation: Generation, head: Head) -> Events:
        chunks = ChatChunks(generation, self.server.model.tokenizer, self.body, self.reports, **head._asdict())
        if not self.body.store:
            return chunks
        return Recorded(chunks, generation.choices, lambda answers: self._keep(generation, answers, head))

    def _keep(self, generation: Generation, answers: list[Answer], head: Head) -> None:
        """Of a stream, which must not hold up the others at its end."""
        work = self.server.tokenise(self.slowness(answers), lambda: self.whole(generation, answers, head))
        task = asyncio.create_task(self._kept(work))
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    async def _kept(self, work: Coroutine[Any, Any, Any]) -> None:
        await work
        await self.settle()

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        answer = self._whole(generation, answers, head)
        if self.body.store:
            stored = Stored.of({**answer, "metadata": self.body.metadata or {}}, self._asked)
            owner = owner_of(self.request.scope)
            if self.server.is_first:
                self.server.chats.put(head.id, owner, stored)
            else:
                described = stored.answer, stored.messages, stored.model, stored.metadata
                self._elsewhere = msgspec.msgpack.encode((head.id, owner, *described))
        return answer

    async def settle(self) -> None:
        content, self._elsewhere = self._elsewhere, None
        if content is None:
            return
        assert self.server.colleagues is not None
        try:
            await self.server.colleagues.give_first("/own/chats", content)
        except ColleagueError as error:
            logger.warning("request %s is not stored: %s", self.request.state.request_id, error)

    def _whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        report = self.reports[0]
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": choices(self.server.model.tokenizer, self.body, answers),
            "service_tier": None,
            "system_fingerprint": None,
            "prompt_logprobs": None if report is None else report.logprobs,
            "prompt_token_ids": list(answers[0].choice.prompt.token_ids) if self.body.return_token_ids else None,
            "kv_transfer_params": None,
            "usage": generation.usage(),
            **timing.told(generation),
        }


class ChatCompletionBatch(ChatCompletion):
    body: ChatBatch

    @property
    def num_prompts(self) -> int:
        return len(self.body.messages)

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        return self.body.messages

    def load(self, num_tokens: int) -> Load:
        return super().load(num_tokens)._replace(param="messages")

    async def tokens(self) -> list[list[int]]:
        fits = self.body.truncate_prompt_tokens is None
        found = []
        for conversation in self.body.messages:
            alone = self.body.model_copy(update={"messages": conversation})
            prompt = await chat_tokens(self.request, alone, fits=fits)
            found.append(prompt.token_ids)
            self.media.append(prompt.media)
        return found

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return {**self._whole(generation, answers, head), "prompt_token_ids": None}  # there are several
