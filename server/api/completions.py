"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from ..dialects.completions import CompletionChunks, choices
from ..dialects.events import Events
from ..generation import timing
from ..generation.answer import Answer
from ..generation.generation import Generation
from ..text.encoding import Encoder
from ..wire.requests import CompletionRequest
from .answer import answer
from .dialect import Generating, Head
from .read import read_request
from .route import new_router

router = new_router()


@router.post("/v1/completions", response_class=Response)
async def completions(request: Request) -> Response:
    return await answer(Completion(request, await read_request(CompletionRequest, request)))


class Completion(Generating):
    id_prefix = "cmpl-"
    body: CompletionRequest
    default_max_tokens = 16  # OpenAI's

    @property
    def num_prompts(self) -> int:
        return len(self.body.prompt)

    async def tokens(self) -> list[list[int]]:
        body, server = self.body, self.server
        fits = body.truncate_prompt_tokens is None
        encoder = Encoder(server.lanes, server.model.tokenizer, server.client.info.max_model_len, "prompt", fits=fits)
        num_characters = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
        return await server.encode(num_characters, encoder, body.prompt, body.add_special_tokens is not False)

    def echo(self, index: int, token_ids: Sequence[int]) -> str:
        body, prompt = self.body, self.body.prompt[index]
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        # what the tokenizer has added is no part of a text
        added = isinstance(prompt, str) and body.add_special_tokens is not False
        core = self.server.model.tokenizer.core
        return core.decode(list(token_ids), skip_special_tokens=added and body.skip_special_tokens is not False)

    def events(self, generation: Generation, head: Head) -> Events:
        return CompletionChunks(generation, self.server.model.tokenizer, self.body, self.reports, **head._asdict())

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices(self.server.model.tokenizer, self.body, generation, answers, self.reports),
            "service_tier": None,
            "system_fingerprint": None,
            "kv_transfer_params": None,
            "usage": generation.usage(),
            **timing.told(generation),
        }
