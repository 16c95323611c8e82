"""POST /v1/embeddings"""

from __future__ import annotations

import time
from base64 import b64encode
from typing import Any

import msgspec
from fastapi import Request, Response

from ..admission import CHARACTERS_PER_TOKEN
from ..embedding import EmbeddingChoice, EmbeddingOptions, numbers, resolve_embeddings
from ..embedding_protocol import EmbeddingRequest
from ..errors import ApiError
from ..generation import Generation, unless_disconnected
from ..middleware import clean_id
from ..state import ServerState
from ..validation import read_request
from .answer import IGNORED_HEADER, header_list
from .route import new_router

router = new_router()


@router.post("/v1/embeddings", response_class=Response)
async def embeddings(request: Request) -> Response:
    """A vector for each input: texts of like meaning get vectors of like direction."""
    arrival = time.monotonic()
    body = await read_request(EmbeddingRequest, request)
    server = ServerState.of(request)
    info = server.engine_info()
    name = server.model_name(body.model)
    if body.request_id is not None and "x-request-id" not in request.headers:
        request.state.request_id = clean_id(body.request_id)
    tokenizer, special = server.model.tokenizer, body.add_special_tokens is not False
    # Not more than a guess: it is let in, or not, before it is tokenised.
    num_tokens = len(await request.body()) // CHARACTERS_PER_TOKEN
    ticket = server.admission.admit(len(body.input), num_tokens, arrival)
    request.state.ticket = ticket  # released when the request is over, however it ends

    def encode() -> list[list[int]]:
        return [tokenizer.encode(text, special) if isinstance(text, str) else text for text in body.input]

    async def collect() -> Generation:
        num_characters = sum(len(text) for text in body.input if isinstance(text, str))
        token_ids = await server.tokenise(num_characters, encode)
        prompts = resolve_embeddings(body, token_ids, server.model, info)
        ticket.settle(sum(len(prompt.token_ids) for prompt in prompts))
        generation = Generation(
            server.client,
            server.metrics,
            tokenizer,
            prompts,
            arrival=arrival,
            text=EmbeddingOptions(),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        server.generations[generation] = request.state.request_id
        request.state.generation = generation  # for whoever looks at the request when it is over
        ticket.watch(generation)
        try:
            if server.request_log.prompts:
                server.request_log.prompt(request.state.request_id, generation, tokenizer)
            async for _ in generation.deltas():
                pass
        finally:
            generation.close()
        return generation

    generation = await unless_disconnected(request.receive, collect())

    def answer() -> bytes:
        num_tokens = sum(len(prompt.token_ids) for prompt in generation.prompts)
        data = [_entry(choice, body.encoding_format == "base64") for choice in generation.choices]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": name, "usage": usage})

    content = await server.tokenise(len(body.input) * info.hidden_size, answer)
    headers = {IGNORED_HEADER: header_list(body.ignored)} if body.ignored else {}
    return Response(content, headers=headers, media_type="application/json")


def _entry(choice: Any, base64: bool) -> dict[str, Any]:
    assert isinstance(choice, EmbeddingChoice)
    if choice.embedding is None:
        raise ApiError(400, "The request was cancelled.", code="cancelled")
    embedding = b64encode(choice.embedding).decode() if base64 else numbers(choice.embedding)
    return {"object": "embedding", "index": choice.index, "embedding": embedding}
