"""POST /v1/chat/completions/render, /v1/completions/render: what the engine would be asked, in vLLM's words; and GET
/tokenizer_info"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from ..generation.sampling import described
from ..state import ServerState
from ..text.encoding import Encoder
from ..text.tokenizer import no_text
from ..wire.requests import ChatRequest, CompletionRequest
from .completions import Completion
from .read import read_request
from .route import new_router
from .tokens import chat_tokens, json_answer, watched

router = new_router()


@router.post("/v1/chat/completions/render", response_class=Response)
async def render_chat(request: Request) -> Response:
    """What a chat request's messages become, text and token ids; nothing is generated."""
    body = await read_request(ChatRequest, request)
    server = ServerState.of(request)
    name = server.model_name(body.model)
    max_model_len = server.engine_info().max_model_len

    async def work() -> Response:
        text, ids, _ = await chat_tokens(request, body, fits=False)
        own = {"prompt": text, "prompt_token_ids": ids, "count": len(ids), "max_model_len": max_model_len}
        asked = _generate_request(server, body, f"chatcmpl-{request.state.request_id}", name, ids, None)
        return await server.tokenise(len(text), lambda: json_answer(body.ignored, asked | own))

    return await watched(request, work())


@router.post("/v1/completions/render", response_class=Response)
async def render_completion(request: Request) -> Response:
    """What the prompts of a completion become, one entry each; nothing is generated."""
    body = await read_request(CompletionRequest, request)
    server = ServerState.of(request)
    name = server.model_name(body.model)
    encoder = Encoder(server.lanes, server.model.tokenizer, server.engine_info().max_model_len, "prompt", fits=False)

    async def work() -> Response:
        num_characters = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
        prompts = await server.encode(num_characters, encoder, body.prompt, body.add_special_tokens is not False)

        def answer() -> Response:
            id = f"cmpl-{request.state.request_id}"
            limit = Completion.default_max_tokens
            asked = [_generate_request(server, body, f"{id}-{i}", name, ids, limit) for i, ids in enumerate(prompts)]
            return json_answer(body.ignored, asked)

        return await server.tokenise(sum(map(len, prompts)), answer)

    return await watched(request, work())


@router.get("/tokenizer_info", response_class=Response)
async def tokenizer_info(request: Request) -> Response:
    """The chat template, special tokens and added tokens, as a tokenizer_config.json has them."""
    server = ServerState.of(request)
    max_model_len = server.engine_info().max_model_len
    tokenizer = server.model.tokenizer
    if tokenizer.missing:
        no_text("tokenizer_info")

    def answer() -> Response:
        added = {
            str(id): {
                "content": token.content, "lstrip": token.lstrip, "normalized": token.normalized,
                "rstrip": token.rstrip, "single_word": token.single_word, "special": token.special,
            }
            for id, token in sorted(tokenizer.core.get_added_tokens_decoder().items())
        }  # fmt: skip
        template = tokenizer.template().source if tokenizer.has_chat_template else None
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # whatever reads a tokenizer.json can read this one
            "model_max_length": max_model_len,
            "vocab_size": tokenizer.core.get_vocab_size(),
            "special_tokens": tokenizer.special_tokens,
            "added_tokens_decoder": added,
            "chat_template": template,
        }
        return Response(msgspec.json.encode(content), media_type="application/json")

    return await server.tokenise(0, answer, slow=True)


def _generate_request(
    server: ServerState,
    body: ChatRequest | CompletionRequest,
    id: str,
    model: str,
    token_ids: list[int],
    default_max_tokens: int | None,
) -> dict[str, Any]:
    """vLLM's, for its own route that generates from tokens. Raises ApiError (400) for what the model cannot do."""
    return {
        "request_id": id,
        "token_ids": token_ids,
        "features": None,
        "sampling_params": described(body, len(token_ids), server.model, server.client.info, default_max_tokens),
        "model": model,
        "stream": bool(body.stream),
        "stream_options": None if body.stream_options is None else body.stream_options.model_dump(exclude_none=True),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": None,
    }
