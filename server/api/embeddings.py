"""POST /v1/embeddings"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from fastapi import Request, Response

from ..errors import ApiError
from ..generation.answer import Answer
from ..generation.choice import Choice, Prompt
from ..generation.embedding import (
    EmbeddingChoice,
    EmbeddingOptions,
    is_normalized,
    merged,
    numbers,
    packed,
    resolve_embeddings,
)
from ..generation.generation import Generation
from ..generation.tasks import EMBED
from ..text.encoding import Encoder
from ..wire.embeddings import EmbeddingRequest
from ..wire.tokens import TokenizeRequest
from .answer import answer
from .dialect import Dialect, Head, Load, Ready
from .read import read_request
from .route import new_router
from .tokens import chat_tokens

router = new_router()


@router.post("/v1/embeddings", response_class=Response)
async def embeddings(request: Request) -> Response:
    """A vector for each input: texts of like meaning get vectors of like direction."""
    return await answer(Embeddings(request, await read_request(EmbeddingRequest, request)))


class Embeddings(Dialect):
    body: EmbeddingRequest
    tasks = (EMBED,)

    @property
    def num_prompts(self) -> int:
        return self.body.num_inputs

    def load(self, num_tokens: int) -> Load:
        """A list, which is soon done, counts as no more than runs at once: the queue has room for others beside it."""
        info = self.server.client.info
        return Load(
            min(self.num_prompts, info.max_num_seqs), min(num_tokens, self.server.admission.capacity), self._param
        )

    async def prompts(self) -> list[Prompt]:
        server = self.server
        token_ids = await self._token_ids()
        work = partial(resolve_embeddings, self.body, token_ids, server.model, server.client.info)
        # The ids are looked up in the vocabulary.
        inputs = await server.tokenise(sum(map(len, token_ids)) >> 6, work)
        self._num_pieces = [len(pieces) for pieces in inputs]
        return [prompt for pieces in inputs for prompt in pieces]

    @property
    def _param(self) -> str:
        return "input" if self.body.messages is None else "messages"

    async def _token_ids(self) -> list[list[int]]:
        """Of each input. Raises ApiError (400)."""
        body, server, info = self.body, self.server, self.server.client.info
        fits = body.truncate_prompt_tokens is None and server.model.pooling.longest is None
        if body.messages is not None:
            chat = TokenizeRequest.model_construct(
                messages=body.messages, add_special_tokens=body.add_special_tokens,
                add_generation_prompt=bool(body.add_generation_prompt), chat_template=body.chat_template,
                continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
            )  # fmt: skip
            _, ids = await chat_tokens(self.request, chat, body.messages, fits=fits)
            return [ids]
        num_characters = sum(len(text) for text in body.input if isinstance(text, str))
        encoder = Encoder(server.lanes, server.model.tokenizer, info.max_model_len, "input", fits=fits)
        return await server.encode(num_characters, encoder, body.input, body.add_special_tokens is not False)

    async def prepare(self, prompts: Sequence[Prompt]) -> Ready:
        return Ready(prompts, EmbeddingOptions())

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        num_tokens = sum(len(prompt.token_ids) for prompt in generation.prompts)
        choices = iter(generation.choices)
        data = [self._entry(index, list(islice(choices, count))) for index, count in enumerate(self._num_pieces)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": head.model, "usage": usage}

    def slowness(self, answers: Sequence[Answer]) -> int:
        return len(answers) * self.server.client.info.hidden_size

    def _entry(self, index: int, pieces: Sequence[Choice]) -> dict[str, Any]:
        vectors = []
        for piece in pieces:
            assert isinstance(piece, EmbeddingChoice)
            if piece.embedding is None:
                raise ApiError(400, "The request was cancelled.", code="cancelled")
            vectors.append(piece.embedding)
        vector = vectors[0]
        if len(vectors) > 1:
            lengths = [len(piece.prompt.token_ids) for piece in pieces]
            vector = merged(vectors, lengths, is_normalized(self.body, self.server.model))
        shown: str | list[float]
        if (body := self.body).encoding_format != "base64":
            shown = numbers(vector)
        elif body.embed_dtype in (None, "float32") and body.endianness != "big":
            shown = b64encode(vector).decode()
        else:
            shown = b64encode(packed(vector, body.embed_dtype or "float32", body.endianness == "big")).decode()
        return {"object": "embedding", "index": index, "embedding": shown}
