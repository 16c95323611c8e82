"""POST /v1/embeddings"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from ..errors import ApiError
from ..generation.answer import Answer
from ..generation.choice import Prompt
from ..generation.embedding import EmbeddingChoice, EmbeddingOptions, numbers, packed, resolve_embeddings
from ..generation.generation import Generation
from ..text.encoding import Encoder
from ..wire.embeddings import EmbeddingRequest
from .answer import answer
from .dialect import Dialect, Head, Load, Ready
from .read import read_request
from .route import new_router

router = new_router()


@router.post("/v1/embeddings", response_class=Response)
async def embeddings(request: Request) -> Response:
    """A vector for each input: texts of like meaning get vectors of like direction."""
    return await answer(Embeddings(request, await read_request(EmbeddingRequest, request)))


class Embeddings(Dialect):
    body: EmbeddingRequest

    @property
    def num_prompts(self) -> int:
        return len(self.body.input)

    def load(self, num_tokens: int) -> Load:
        """A list, which is soon done, counts as no more than runs at once: the queue has room for others beside it."""
        info = self.server.client.info
        return Load(min(self.num_prompts, info.max_num_seqs), min(num_tokens, self.server.admission.capacity), "input")

    async def prompts(self) -> list[Prompt]:
        body, server, info = self.body, self.server, self.server.client.info
        num_characters = sum(len(text) for text in body.input if isinstance(text, str))
        fits = body.truncate_prompt_tokens is None
        encoder = Encoder(server.lanes, server.model.tokenizer, info.max_model_len, "input", fits=fits)
        token_ids = await server.encode(num_characters, encoder, body.input, body.add_special_tokens is not False)
        work = partial(resolve_embeddings, body, token_ids, server.model, info)
        return await server.tokenise(sum(map(len, token_ids)) >> 6, work)  # the ids are looked up in the vocabulary

    async def prepare(self, prompts: Sequence[Prompt]) -> Ready:
        return Ready(prompts, EmbeddingOptions())

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        num_tokens = sum(len(prompt.token_ids) for prompt in generation.prompts)
        data = [self._entry(choice) for choice in generation.choices]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": head.model, "usage": usage}

    def slowness(self, answers: Sequence[Answer]) -> int:
        return len(answers) * self.server.client.info.hidden_size

    def _entry(self, choice: Any) -> dict[str, Any]:
        assert isinstance(choice, EmbeddingChoice)
        if (vector := choice.embedding) is None:
            raise ApiError(400, "The request was cancelled.", code="cancelled")
        shown: str | list[float]
        if (body := self.body).encoding_format != "base64":
            shown = numbers(vector)
        elif body.embed_dtype in (None, "float32") and body.endianness != "big":
            shown = b64encode(vector).decode()
        else:
            shown = b64encode(packed(vector, body.embed_dtype or "float32", body.endianness == "big")).decode()
        return {"object": "embedding", "index": choice.index, "embedding": shown}
