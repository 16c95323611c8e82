"""POST /v1/embeddings, and in Cohere's words POST /v2/embed"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from fastapi import Request, Response

from ..generation.answer import Answer
from ..generation.choice import Choice, Prompt
from ..generation.embedding import bits, is_normalized, merged, numbers, prompt_prefix, resolve_embeddings
from ..generation.generation import Generation
from ..generation.tasks import EMBED
from ..state import ServerState
from ..wire.embeddings import CohereEmbedRequest, EmbeddingRequest
from .answer import answer
from .dialect import Head
from .ignored import ignored_headers
from .pooled import InputDialect, encoded, listed, raw_response, usage, vector_of
from .read import read_request
from .route import new_router

router = new_router()


@router.post("/v1/embeddings", response_class=Response)
async def embeddings(request: Request) -> Response:
    """A vector for each input: texts of like meaning get vectors of like direction."""
    return await answer(Embeddings(request, await read_request(EmbeddingRequest, request)))


@router.post("/v2/embed", response_class=Response)
async def cohere_embed(request: Request) -> Response:
    """Vectors of texts, as Cohere has it."""
    return await answer(CohereEmbed(request, await read_request(CohereEmbedRequest, request)))


class Embeddings(InputDialect):
    body: EmbeddingRequest
    tasks = (EMBED,)

    async def prompts(self) -> list[Prompt]:
        server, body = self.server, self.body
        fits = body.truncate_prompt_tokens is None and server.model.pooling.longest is None
        token_ids = await self.token_ids(fits, prompt_prefix(body, server.model))
        work = partial(resolve_embeddings, body, token_ids, server.model, server.client.info)
        # The ids are looked up in the vocabulary.
        inputs = await server.tokenise(sum(map(len, token_ids)) >> 6, work)
        self._num_pieces = [len(pieces) for pieces in inputs]
        return [prompt for pieces in inputs for prompt in pieces]

    def vectors(self, generation: Generation) -> list[bytes]:
        choices = iter(generation.choices)
        return [self._vector(list(islice(choices, count))) for count in self._num_pieces]

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(vector, self.body)}
            for index, vector in enumerate(self.vectors(generation))
        ]
        return {"object": "list", "data": data, "model": head.model, "usage": usage(generation)}

    def respond(self, generation: Generation, answers: Sequence[Answer], head: Head) -> Response:
        if not self.body.is_raw:
            return super().respond(generation, answers, head)
        vectors = [(vector, (len(vector) // 4,)) for vector in self.vectors(generation)]
        about = {"id": head.id, "created": head.created, "model": head.model, "usage": usage(generation)}
        return raw_response(vectors, self.body, about, self.headers)

    def _vector(self, pieces: Sequence[Choice]) -> bytes:
        vectors = [vector_of(piece) for piece in pieces]
        if len(vectors) == 1:
            return vectors[0]
        lengths = [len(piece.prompt.token_ids) for piece in pieces]
        return merged(vectors, lengths, is_normalized(self.body, self.server.model))


class CohereEmbed(Embeddings):
    """An embedding request in other words."""

    def __init__(self, request: Request, asked: CohereEmbedRequest) -> None:
        """Raises ApiError (503) while the engine cannot serve."""
        server = ServerState.of(request).serving(asked.model, self.tasks)
        self.asked = asked
        super().__init__(request, asked.as_embeddings(server.model.pooling.prompts, server.engine_info().max_model_len))

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        vectors = self.vectors(generation)
        kinds = dict.fromkeys(self.asked.embedding_types or ["float"])
        billed = {"input_tokens": usage(generation)["prompt_tokens"], "image_tokens": 0}
        return {
            "id": head.id,
            "embeddings": {kind: [_FORMS[kind](vector) for vector in vectors] for kind in kinds},
            "texts": self.asked.texts,
            "response_type": "embeddings_by_type",
            "meta": {"api_version": {"version": "2"}, "billed_units": billed},
        }

    @property
    def headers(self) -> Mapping[str, str]:
        return ignored_headers(self.asked.ignored)


_FORMS: dict[str, Callable[[bytes], Any]] = {
    "float": lambda vector: listed(numbers(vector)),
    "base64": lambda vector: b64encode(vector).decode(),
    "binary": partial(bits, signed=True),
    "ubinary": partial(bits, signed=False),
}
