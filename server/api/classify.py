"""POST /classify, and POST /pooling: whatever a model makes of texts that is not text"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from fastapi import Request, Response

from ...engine.link.sampling_params import ALL, LAST, Pooling
from ..errors import bad_request
from ..generation.answer import Answer
from ..generation.choice import Prompt
from ..generation.embedding import as_bytes, numbers, of_embeddings, resolve_pooled
from ..generation.generation import Generation
from ..generation.pooling import MAX_NUMBERS, check_numbers, pooled_values, pooling_of
from ..generation.scores import activated, activation_of
from ..generation.tasks import CLASSIFY, EMBED, REWARD
from ..wire.pooled import ClassifyRequest, PoolingRequest
from .answer import answer
from .dialect import Head
from .pooled import InputDialect, encoded, listed, raw_response, usage, vector_of
from .read import read_request
from .route import new_router

router = new_router()


@router.post("/classify", response_class=Response)
async def classify(request: Request) -> Response:
    """How likely each class is."""
    return await answer(Classify(request, await read_request(ClassifyRequest, request)))


@router.post("/pooling", response_class=Response)
async def pooling(request: Request) -> Response:
    """Vectors or numbers, of each input or of each of its tokens."""
    return await answer(PoolingDialect(request, await read_request(PoolingRequest, request)))


class Classify(InputDialect):
    body: ClassifyRequest
    id_prefix = "classify-"
    tasks = (CLASSIFY, REWARD)

    async def prompts(self) -> list[Prompt]:
        server, body = self.server, self.body
        info = server.engine_info()
        if info.by_token and CLASSIFY in info.tasks:
            raise bad_request("This model classifies each token: use /pooling.", "model", "unsupported_task")
        token_ids = await self.token_ids(body.truncate_prompt_tokens is None)
        pooling = Pooling(LAST, normalize=False, head=True)
        work = partial(
            resolve_pooled, body, token_ids, pooling, server.model, info, param=body.param, is_text=body.is_text
        )
        return await server.tokenise(sum(map(len, token_ids)) >> 6, work)

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        info = self.server.client.info
        activation = activation_of(self.body.activates, self.server.model, info)
        data = []
        for index, choice in enumerate(generation.choices):
            logits = numbers(vector_of(choice))
            best = max(range(len(logits)), key=logits.__getitem__)
            probabilities = activated(logits, activation)
            data.append(
                {"index": index, "label": info.labels[best], "probs": probabilities, "num_classes": len(logits)}
            )
        about = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
        return about | {"data": data, "usage": usage(generation)}


class PoolingDialect(InputDialect):
    body: PoolingRequest
    id_prefix = "pool-"
    tasks = (EMBED, CLASSIFY, REWARD)

    async def prompts(self) -> list[Prompt]:
        server, body = self.server, self.body
        model, info = server.model, server.engine_info()
        self._pooling = pooling_of(body.task, model, info, normalize=body.normalize, dimensions=body.dimensions)
        prefix = model.pooling.prefix if EMBED in info.tasks else ""
        token_ids = await self.token_ids(body.truncate_prompt_tokens is None, prefix)
        limited = of_embeddings(model, info) if EMBED in info.tasks else info
        work = partial(
            resolve_pooled, body, token_ids, self._pooling, model, limited, param=body.param, is_text=body.is_text
        )
        prompts = await server.tokenise(sum(map(len, token_ids)) >> 6, work)
        check_numbers(prompts, self._pooling, info, body.param)
        return prompts

    def slowness(self, answers: Sequence[Answer]) -> int:
        return len(answers) * MAX_NUMBERS if self._pooling.kind == ALL else super().slowness(answers)

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        data = [
            {"index": index, "object": "pooling", "data": self._entry(vector_of(choice), choice.prompt)}
            for index, choice in enumerate(generation.choices)
        ]
        about = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
        return about | {"data": data, "usage": usage(generation)}

    def respond(self, generation: Generation, answers: Sequence[Answer], head: Head) -> Response:
        if not self.body.is_raw:
            return super().respond(generation, answers, head)
        vectors = [self._in_bytes(vector_of(choice), choice.prompt) for choice in generation.choices]
        about = {"id": head.id, "created": head.created, "model": head.model, "usage": usage(generation)}
        return raw_response(vectors, self.body, about, self.headers)

    def _entry(self, values: bytes, prompt: Prompt) -> Any:
        if self.body.encoding_format != "base64":
            found = self._values(values, prompt)
            return [listed(row) for row in found] if found and isinstance(found[0], list) else listed(found)
        return encoded(self._in_bytes(values, prompt)[0], self.body)

    def _in_bytes(self, values: bytes, prompt: Prompt) -> tuple[bytes, tuple[int, ...]]:
        """(little-endian float32, its shape: rows are tokens)."""
        found = self._values(values, prompt)
        if not found or not isinstance(found[0], list):
            return as_bytes(found), (len(found),)
        return as_bytes(list(chain.from_iterable(found))), (len(found), len(found[0]))

    def _values(self, values: bytes, prompt: Prompt) -> Any:
        body, model, info = self.body, self.server.model, self.server.client.info
        return pooled_values(
            values, prompt.token_ids, self._pooling, info, model.pooling,
            activation=activation_of(body.use_activation, model, info), normalize=body.normalize,
        )  # fmt: skip
