"""POST /v1/score and /score; /v1/rerank, /rerank and /v2/rerank: how well texts go with others"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from ...engine.link.sampling_params import LAST, Pooling
from ..errors import context_length_exceeded
from ..generation.answer import Answer
from ..generation.choice import Prompt
from ..generation.embedding import embedding, of_embeddings, resolve_pooled
from ..generation.generation import Generation
from ..generation.scores import activation_of, check_scores_pairs, cosine, encode_pair, score
from ..generation.tasks import CLASSIFY, EMBED
from ..generation.weight import UNTOLD
from ..text.encoding import FREE, MOST, TURN
from ..text.tokenizer import Pair
from ..wire.scores import PairRequest, RerankRequest, ScoreRequest
from .answer import answer
from .dialect import Head
from .pooled import PooledDialect, usage, vector_of
from .read import read_request
from .route import new_router

router = new_router()


@router.post("/v1/score", response_class=Response)
@router.post("/score", response_class=Response)
async def scores(request: Request) -> Response:
    """Of one query and many documents, or of pairs."""
    return await answer(Scores(request, await read_request(ScoreRequest, request)))


@router.post("/v2/rerank", response_class=Response)
@router.post("/v1/rerank", response_class=Response)
@router.post("/rerank", response_class=Response)
async def rerank(request: Request) -> Response:
    """Documents in the order in which they answer a query, the best first."""
    return await answer(Rerank(request, await read_request(RerankRequest, request)))


class Pairs(PooledDialect):
    """A classifier reads each pair as one text; of embeddings, a score is the cosine of the two."""

    body: PairRequest
    tasks = (CLASSIFY, EMBED)
    bytes_per_number = UNTOLD

    @property
    def num_prompts(self) -> int:
        return self.body.num_pairs

    @property
    def param(self) -> str:
        return self.body.document_param

    async def prompts(self) -> list[Prompt]:
        body, server, info = self.body, self.server, self.server.engine_info()
        check_scores_pairs(info)
        queries, documents = body.queries_and_documents
        for text in (max(queries, key=len), max(documents, key=len)):
            most = max(FREE, MOST * info.max_model_len)
            if len(text) > most and not body.is_cut:
                raise context_length_exceeded(info.max_model_len, len(text) // MOST, None, self.param)
        if CLASSIFY in info.tasks:
            pooling = Pooling(LAST, normalize=False, head=True)
            if len(queries) < len(documents):
                queries = queries * len(documents)
            token_ids = await self._in_turns(list(zip(queries, documents, strict=True)))
        else:
            pooling, info = embedding(server.model, info, normalize=False), of_embeddings(server.model, info)
            token_ids = await self._in_turns(
                [*((text, None) for text in queries), *((None, text) for text in documents)]
            )
        work = partial(resolve_pooled, body, token_ids, pooling, server.model, info, param=self.param)
        return await server.tokenise(sum(len(pair.token_ids) for pair in token_ids) >> 6, work)

    async def _in_turns(self, texts: Sequence[tuple[str | None, str | None]]) -> list[Pair]:
        """Token ids of (query, document), or of one of them; others come between turns."""
        found: list[Pair] = []
        start = size = 0
        for i, pair in enumerate(texts):
            size += sum(len(text or "") for text in pair)
            if size >= TURN or i == len(texts) - 1:
                turn = texts[start : i + 1]
                found += await self.server.tokenise(size, partial(self._encode, turn))
                start, size = i + 1, 0
        return found

    def _encode(self, texts: Sequence[tuple[str | None, str | None]]) -> list[Pair]:
        return [encode_pair(self.server.pairs, self.body, self.server.client.info, *pair) for pair in texts]

    def scores(self, generation: Generation) -> list[float]:
        """Of each pair, in their order."""
        info, vectors = self.server.client.info, [vector_of(choice) for choice in generation.choices]
        if CLASSIFY in info.tasks:
            activation = activation_of(self.body.use_activation, self.server.model, info)
            return [score(vector, activation) for vector in vectors]
        count = self.body.num_pairs
        queries = vectors[:-count] * (count if len(vectors) == count + 1 else 1)
        return [cosine(*pair) for pair in zip(queries, vectors[-count:], strict=True)]


class Scores(Pairs):
    body: ScoreRequest
    id_prefix = "score-"

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(self.scores(generation))]
        about = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
        return about | {"data": data, "usage": usage(generation)}


class Rerank(Pairs):
    body: RerankRequest
    id_prefix = "rerank-"

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        body, scores = self.body, self.scores(generation)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        shows = body.return_documents is not False
        results = [
            {"index": i} | ({"document": {"text": body.documents[i]}} if shows else {}) | {"relevance_score": scores[i]}
            for i in order
        ]
        answer: dict[str, Any] = {"id": head.id, "model": head.model, "usage": usage(generation), "results": results}
        if self.request.scope["path"].endswith("/v2/rerank"):
            answer["meta"] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return answer
