"""POST /v1/completions"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ..logprobs import completion_logprobs
from ..protocol import CompletionRequest, read_request
from ..sse import CompletionChunks
from ..state import ServerState
from .answer import Answer, respond

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", response_class=Response)
async def completions(request: Request) -> Response:
    body = await read_request(CompletionRequest, request)
    server = ServerState.of(request)
    tokenizer = server.model.tokenizer
    special = body.add_special_tokens is not False

    def encode() -> list[list[int]]:
        return [tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in body.prompt]

    async def tokenise() -> list[list[int]]:
        return await server.tokenise(sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str)), encode)

    def full(server: ServerState, answers: list[Answer]) -> dict[str, Any]:
        return {
            "object": "text_completion",
            "choices": [_choice(server, body, answer) for answer in answers],
            "service_tier": None,
            "system_fingerprint": None,
            "kv_transfer_params": None,
        }

    return await respond(
        request,
        body,
        id_prefix="cmpl",
        tokenise=tokenise,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        chunks=CompletionChunks,
        full=full,
    )


def _choice(server: ServerState, body: CompletionRequest, answer: Answer) -> dict[str, Any]:
    num_top = body.num_logprobs
    return {
        "index": answer.choice.index,
        "text": answer.text,
        "logprobs": None if num_top is None else completion_logprobs(server.model.tokenizer, answer.delta, num_top),
        "finish_reason": answer.choice.finish_reason,
        "stop_reason": answer.choice.stop_reason,
        "token_ids": answer.token_ids if body.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": answer.choice.prompt.token_ids if body.return_token_ids else None,
    }
