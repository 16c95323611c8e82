"""POST /inference/v1/generate: token ids in, token ids out"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from ..dialects.events import Events
from ..dialects.tokens_out import TokenChunks, TokenForm
from ..generation.answer import Answer
from ..generation.generation import Generation
from ..generation.logprobs import LogprobFormat
from ..wire.requests import CompletionRequest
from ..wire.tokens_in import TokensRequest
from .answer import answer
from .completions import Completion
from .dialect import Head
from .ignored import ignored_headers
from .read import check_ignored, read_request, work_on_body
from .route import new_router

router = new_router()


@router.post("/inference/v1/generate", response_class=Response)
async def generate(request: Request) -> Response:
    """What the model makes of token ids, in token ids; in vLLM's words."""
    asked = await read_request(TokensRequest, request)
    body = await work_on_body(request, asked.completion)
    check_ignored(request, asked.ignored_beside(body))
    return await answer(TokensOut(request, asked, body))


class TokensOut(Completion):
    id_prefix = "generate-tokens-"
    default_max_tokens = None  # type: ignore[assignment]

    def __init__(self, request: Request, asked: TokensRequest, body: CompletionRequest) -> None:
        super().__init__(request, body)
        self._ignored, self._shows_prompt = asked.ignored_beside(body), bool(asked.return_token_ids)
        asked.token_ids = []  # the body has them
        tokenizer = self.server.model.tokenizer
        with_text = asked.output_mode == "text" and not tokenizer.missing
        self._form = TokenForm(tokenizer, LogprobFormat.of(body), with_text)
        if not with_text and not body.stop:
            self.text = replace(self.text, detokenize=False)

    def events(self, generation: Generation, head: Head) -> Events:
        usage = self.body.include_usage, self.body.continuous_usage
        return TokenChunks(generation, self._form, head.id, usage, self._shows_prompt)

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        report = self.reports[0]
        return {
            "request_id": head.id,
            "created": head.created,
            "model": head.model,
            "output_mode": self._form.mode,
            "choices": [self._form.whole(answer) for answer in answers],
            "usage": generation.usage(),
            "prompt_logprobs": None if report is None else report.logprobs,
            "prompt_token_ids": list(generation.prompts[0].token_ids) if self._shows_prompt else None,
            "kv_transfer_params": None,
        }

    @property
    def headers(self) -> Mapping[str, str]:
        return ignored_headers(self._ignored)
