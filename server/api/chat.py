"""POST /v1/chat/completions"""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from ..generation import Generation
from ..logprobs import LogprobFormat, chat_logprobs
from ..parsers.parts import CallBegin, Content, Reasoning
from ..protocol import ChatRequest
from ..speech import Speech
from ..sse import ChatChunks
from ..state import ServerState
from ..validation import read_request
from .answer import Answer, Head, respond
from .route import new_router
from .tokens import chat_tokens

router = new_router()


@router.post("/v1/chat/completions", response_class=Response)
async def chat_completions(request: Request) -> Response:
    body = await read_request(ChatRequest, request)
    server = ServerState.of(request)
    tokenizer = server.model.tokenizer
    speech = Speech.of(body, server.model)

    async def tokenise() -> list[list[int]]:
        _, token_ids = await chat_tokens(request, body, body.messages)
        return [token_ids]

    def echo(index: int, token_ids: list[int]) -> str:
        """The message that the answer goes on from."""
        final: dict[str, Any] = body.messages[-1]
        return final["content"] if final["role"] == "assistant" else ""

    def full(generation: Generation, answers: list[Answer], head: Head) -> dict[str, Any]:
        (report,) = generation.reports
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [_choice(server, body, answer) for answer in answers],
            "service_tier": None,
            "system_fingerprint": None,
            "prompt_logprobs": None if report is None else report.logprobs,
            "prompt_token_ids": answers[0].choice.prompt.token_ids if body.return_token_ids else None,
            "kv_transfer_params": None,
            "usage": generation.usage(),
        }

    return await respond(
        request,
        body,
        id_prefix="chatcmpl-",
        tokenise=tokenise,
        echo=echo if body.echo else None,
        default_max_tokens=None,
        chunks=lambda generation, head: ChatChunks(generation, tokenizer, body, **head._asdict()),
        full=full,
        speech=speech,
    )


def message(answer: Answer) -> dict[str, Any]:
    """What the assistant said. Its fields are there when they have something to say, and those that always are."""
    reasoning: str | None = None
    content = answer.choice.prompt.echo
    calls: list[dict[str, Any]] = []
    if not answer.parts:
        content += answer.text
    for part in answer.parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Reasoning):
            reasoning = (reasoning or "") + part.text
        elif isinstance(part, CallBegin):
            calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        else:
            calls[part.index]["function"]["arguments"] += part.text
    said: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not answer.parts else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": reasoning,
    }
    if reasoning is not None:
        said["reasoning_content"] = reasoning
    if calls:
        said["tool_calls"] = calls
    return said


def _choice(server: ServerState, body: ChatRequest, answer: Answer) -> dict[str, Any]:
    form = LogprobFormat.of(body)
    return {
        "index": answer.choice.index,
        "message": message(answer),
        "logprobs": None if form is None else chat_logprobs(server.model.tokenizer, answer.delta, form),
        "finish_reason": answer.choice.ending,
        "stop_reason": answer.choice.stop_reason,
        "token_ids": answer.token_ids if body.return_token_ids else None,
    }
