"""POST /v1/chat/completions"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ..logprobs import chat_logprobs
from ..protocol import ChatRequest, read_request
from ..sse import ChatChunks
from ..state import ServerState
from .answer import Answer, respond

router = APIRouter()


@router.post("/v1/chat/completions", response_class=Response)
async def chat_completions(request: Request) -> Response:
    body = await read_request(ChatRequest, request)
    server = ServerState.of(request)
    tokenizer = server.model.tokenizer
    options = dict(body.chat_template_kwargs or {})
    tokenizer.check_template_kwargs(options)
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    continued = bool(body.continue_final_message)
    options["continue_final_message"] = continued
    answer_follows = body.add_generation_prompt
    options["add_generation_prompt"] = not continued if answer_follows is None else answer_follows

    def encode() -> list[list[int]]:
        # The template writes its own special tokens: the tokenizer's would come on top.
        return [tokenizer.encode(tokenizer.render(body.messages, options), bool(body.add_special_tokens))]

    async def tokenise() -> list[list[int]]:
        return await server.tokenise(sum(len(message["content"]) for message in body.messages), encode)

    def full(server: ServerState, answers: list[Answer]) -> dict[str, Any]:
        return {
            "object": "chat.completion",
            "choices": [_choice(server, body, answer) for answer in answers],
            "service_tier": None,
            "system_fingerprint": None,
            "prompt_logprobs": None,
            "prompt_token_ids": answers[0].choice.prompt.token_ids if body.return_token_ids else None,
            "kv_transfer_params": None,
        }

    return await respond(
        request,
        body,
        id_prefix="chatcmpl",
        tokenise=tokenise,
        default_max_tokens=None,
        chunks=ChatChunks,
        full=full,
    )


def _choice(server: ServerState, body: ChatRequest, answer: Answer) -> dict[str, Any]:
    num_top = body.num_logprobs
    return {
        "index": answer.choice.index,
        "message": {
            "role": "assistant",
            "content": answer.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None if num_top is None else chat_logprobs(server.model.tokenizer, answer.delta, num_top),
        "finish_reason": answer.choice.finish_reason,
        "stop_reason": answer.choice.stop_reason,
        "token_ids": answer.token_ids if body.return_token_ids else None,
    }
