"""POST /v1/completions"""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from ..generation import Generation
from ..logprobs import LogprobFormat, PromptReport, completion_logprobs
from ..protocol import CompletionRequest
from ..sse import CompletionChunks
from ..state import ServerState
from ..validation import read_request
from .answer import Answer, Head, respond
from .route import new_router

router = new_router()

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

    def echo(index: int, token_ids: list[int]) -> str:
        prompt = body.prompt[index]
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        return tokenizer.core.decode(token_ids, skip_special_tokens=body.skip_special_tokens is not False)

    def full(generation: Generation, answers: list[Answer], head: Head) -> dict[str, Any]:
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [
                _choice(server, body, answer, generation.reports[i // generation.n]) for i, answer in enumerate(answers)
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "kv_transfer_params": None,
            "usage": generation.usage(),
        }

    return await respond(
        request,
        body,
        id_prefix="cmpl-",
        tokenise=tokenise,
        echo=echo if body.echo else None,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        chunks=lambda generation, head: CompletionChunks(generation, tokenizer, body, **head._asdict()),
        full=full,
    )


def _choice(
    server: ServerState, body: CompletionRequest, answer: Answer, report: PromptReport | None
) -> dict[str, Any]:
    form = LogprobFormat.of(body)
    logprobs = None
    if form is not None:
        logprobs = completion_logprobs(server.model.tokenizer, answer.token_ids, answer.logprobs, answer.offsets, form)
        if report is not None and report.echo is not None:
            logprobs = {name: report.echo[name] + values for name, values in logprobs.items()}
    return {
        "index": answer.choice.index,
        "text": answer.choice.prompt.echo + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.choice.finish_reason,
        "stop_reason": answer.choice.stop_reason,
        "token_ids": answer.token_ids if body.return_token_ids else None,
        "prompt_logprobs": None if report is None else report.logprobs,
        "prompt_token_ids": answer.choice.prompt.token_ids if body.return_token_ids else None,
    }
