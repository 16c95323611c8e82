"""POST /tokenize, /detokenize, /v1/chat/completions/render: what becomes of text before a model sees it"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from ..errors import bad_request
from ..prompt import chat_options, chat_prompt
from ..protocol import ChatRequest
from ..state import ServerState
from ..token_protocol import DetokenizeRequest, TokenizeRequest
from ..validation import read_request
from .answer import IGNORED_HEADER, header_list
from .route import new_router

router = new_router()


@router.post("/tokenize", response_class=Response)
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of the prompt that messages become."""
    body = await read_request(TokenizeRequest, request)
    server = ServerState.of(request)
    server.model_name(body.model)
    tokenizer = server.model.tokenizer
    if body.messages is not None:
        _, token_ids = await chat_tokens(request, body, body.messages)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        token_ids = await server.tokenise(len(text), lambda: tokenizer.encode(text, special))
    names = [tokenizer.core.id_to_token(token_id) for token_id in token_ids] if body.return_token_strs else None
    return _answer(
        body.ignored,
        {
            "count": len(token_ids),
            "max_model_len": server.engine_info().max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        },
    )


@router.post("/detokenize", response_class=Response)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read_request(DetokenizeRequest, request)
    server = ServerState.of(request)
    server.model_name(body.model)
    vocab_size = server.engine_info().vocab_size
    if wrong := next((token for token in body.tokens if not 0 <= token < vocab_size), None):
        raise bad_request(f"'tokens' has the token id {wrong}; the vocabulary ends at {vocab_size - 1}.", "tokens")
    core, skip = server.model.tokenizer.core, bool(body.skip_special_tokens)
    text = await server.tokenise(4 * len(body.tokens), lambda: core.decode(body.tokens, skip_special_tokens=skip))
    return _answer(body.ignored, {"prompt": text})


@router.post("/v1/chat/completions/render", response_class=Response)
async def render(request: Request) -> Response:
    """What a chat request's messages become, text and token ids; nothing is generated."""
    body = await read_request(ChatRequest, request)
    server = ServerState.of(request)
    server.model_name(body.model)
    text, token_ids = await chat_tokens(request, body, body.messages)
    max_model_len = server.engine_info().max_model_len
    return _answer(
        body.ignored,
        {"prompt": text, "prompt_token_ids": token_ids, "count": len(token_ids), "max_model_len": max_model_len},
    )


async def chat_tokens(
    request: Request, body: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]]
) -> tuple[str, list[int]]:
    """(the rendered text, its token ids) of a chat that `request` asks for in whatever API. Raises ApiError (400)."""
    server = ServerState.of(request)
    tokenizer = server.model.tokenizer
    options = chat_options(body, tokenizer, server.config.trust_request_chat_template)
    # Tools, documents and variables are part of the prompt too; stored messages are in no body.
    num_characters = max(len(await request.body()), sum(len(message["content"]) for message in messages))
    return await server.tokenise(
        num_characters, lambda: chat_prompt(body, tokenizer, options), tokenizer.renders_slowly(options)
    )


def _answer(ignored: list[str], content: dict[str, Any]) -> Response:
    headers = {IGNORED_HEADER: header_list(ignored)} if ignored else {}
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")
