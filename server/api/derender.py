"""POST /v1/chat/completions/derender, /v1/completions/derender: answers in token ids as text, in OpenAI's shape"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from ...engine.link.messages import RequestOutput
from ...engine.link.plan import TokenLogprobs
from ...engine.link.sampling_params import SamplingParams
from ..client.mailbox import Mailbox
from ..dialects import chat, completions
from ..errors import bad_request
from ..generation.answer import Answer, Collected
from ..generation.choice import Choice, Prompt, TextOptions
from ..generation.sampling import check_tokens, text_options
from ..generation.speech import Speech
from ..http.tenant import tenant_of
from ..state import ServerState
from ..text.tokenizer import no_text
from ..wire.requests import ChatRequest, CompletionRequest
from ..wire.tokens_in import DerenderChat, DerenderCompletions, SampledLogprob, TokensResponse
from .read import read_request, work_on_body
from .route import new_router
from .tokens import json_answer, watched

router = new_router()
_NOTHING = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
# Characters that are tokenised in the time that a token is made text, a choice is made, a log-probability written.
TOKEN, CHOICE, LOGPROB = 4, 128, 16


@router.post("/v1/chat/completions/derender", response_class=Response)
async def derender_chat(request: Request) -> Response:
    """The chat completion that an answer in token ids is; with what was asked, its reasoning and tool calls."""
    body = await read_request(DerenderChat, request)
    server, name = _server(request, body.model)
    given = body.generate_response
    asked = body.chat_request or ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}]})
    prompt, num_top = await work_on_body(
        request, lambda: (_prompt(server, given, body.prompt_token_ids), _num_logprobs([given]))
    )
    if num_top is not None:
        asked.logprobs, asked.top_logprobs = True, max(num_top, asked.top_logprobs or 0)

    async def work() -> Response:
        text, speech = text_options(asked), Speech.of(asked, server.model)
        if speech is not None and body.chat_request is not None:
            tokenizer = server.model.tokenizer
            _, text, _ = await speech.prepare(None, tenant_of(request.scope), [prompt], text, tokenizer)

        def answered() -> Response:
            answers = _answers(server, given, prompt, text)
            said = {
                "id": given.request_id or f"chatcmpl-{request.state.request_id}", "object": "chat.completion",
                "created": int(time.time()), "model": name,
                "choices": chat.choices(server.model.tokenizer, asked, answers),
                "usage": _usage([given], [body.prompt_tokens or 0]), **_NOTHING, "prompt_logprobs": None,
                "prompt_token_ids": None,
            }  # fmt: skip
            return json_answer(body.ignored, said)

        return await server.tokenise(_work([given]), answered)

    return await watched(request, work())


@router.post("/v1/completions/derender", response_class=Response)
async def derender_completions(request: Request) -> Response:
    """The completion that answers in token ids are, one for each prompt."""
    body = await read_request(DerenderCompletions, request)
    server, name = _server(request, body.model)
    given = body.generate_responses
    for param in ("prompt_tokens", "prompt_token_ids"):
        if (each := getattr(body, param)) is not None and len(each) != len(given):
            raise bad_request(f"'{param}' has {len(each)} entries for {len(given)} generate_responses.", param)
    asked = body.completion_request or CompletionRequest.model_validate({"prompt": [[0]]})
    if (num_top := _num_logprobs(given)) is not None:
        asked.logprobs = max(num_top, asked.logprobs or 0)
    ids = body.prompt_token_ids or [None] * len(given)
    prompts = await work_on_body(
        request, lambda: [_prompt(server, one, own) for one, own in zip(given, ids, strict=True)]
    )

    def answered() -> Response:
        text = text_options(asked)
        answers = [
            answer for one, prompt in zip(given, prompts, strict=True) for answer in _answers(server, one, prompt, text)
        ]
        written = [completions.one_choice(server.model.tokenizer, asked, answer, None, None) for answer in answers]
        said = {
            "id": given[0].request_id or f"cmpl-{request.state.request_id}", "object": "text_completion",
            "created": int(time.time()), "model": name,
            "choices": [{**choice, "index": index} for index, choice in enumerate(written)],
            "usage": _usage(given, body.prompt_tokens or []), **_NOTHING,
        }  # fmt: skip
        return json_answer(body.ignored, said)

    return await watched(request, server.tokenise(_work(given), answered))


def _server(request: Request, model: str | None) -> tuple[ServerState, str]:
    """Raises ApiError (400, 404, 503)."""
    server = ServerState.of(request)
    name = server.model_name(model)
    server.engine_info()
    if server.model.tokenizer.missing:
        no_text("generate_response")
    return server, name


def _prompt(server: ServerState, given: TokensResponse, token_ids: Sequence[int] | None) -> Prompt:
    """What the answer follows. Raises ApiError (400) for what this model could not have said."""
    info = server.client.info
    ids = token_ids if token_ids is not None else given.prompt_token_ids or []
    check_tokens("prompt_token_ids", ids, info)
    for choice in given.choices:
        found, entries = choice.token_ids or [], (choice.logprobs.content if choice.logprobs else None) or []
        check_tokens("token_ids", found, info)
        if len(found) > info.max_model_len:
            message = f"'token_ids' has {len(found)} entries, and the context {info.max_model_len}."
            raise bad_request(message, "token_ids")
        if entries and len(entries) != len(found):
            raise bad_request(f"'logprobs' has {len(entries)} entries for {len(found)} tokens.", "logprobs")
        for entry in entries:
            check_tokens("logprobs", [entry.token_id, *(other.token_id for other in entry.top_logprobs)], info)
    num_top = _num_logprobs([given])
    return Prompt(array("i", ids), SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_top))


def _num_logprobs(given: Sequence[TokensResponse]) -> int | None:
    """The most that stand at a place; None: no answer has any."""
    contents = [one.logprobs.content for each in given for one in each.choices if one.logprobs and one.logprobs.content]
    return max((len(entry.top_logprobs) for content in contents for entry in content), default=None)


def _answers(server: ServerState, given: TokensResponse, prompt: Prompt, text: TextOptions) -> list[Answer]:
    """Of each choice, read as those are that the engine has just said."""
    made: list[Choice] = []
    collected = Collected(made)
    ends, tokenizer = server.model.eos_token_ids, server.model.tokenizer
    for index, one in enumerate(given.choices):
        ids = one.token_ids or []
        choice = text.choice(index, prompt, Mailbox(0, 0.0), tokenizer)
        made.append(choice)
        entries = one.logprobs.content if one.logprobs else None
        logprobs = None if prompt.sampling.logprobs is None else [_logprobs(entry) for entry in entries or ()]
        if logprobs is not None and len(logprobs) != len(ids):
            logprobs = [TokenLogprobs(0.0, 1, [], [])] * len(ids)
        finish = one.finish_reason or "stop"
        ended = bool(ids) and finish == "stop" and ids[-1] in ends
        outputs = [RequestOutput(0, ids, finish if ended else None, None, logprobs)]
        if not ended:  # a stop string, which stays, or a limit: no token ends it
            outputs.append(RequestOutput(0, [], finish, None, None if logprobs is None else []))
        for output in outputs:
            collected.add(choice, choice.feed(output))
    return collected.answers()


def _logprobs(entry: SampledLogprob) -> TokenLogprobs:
    top = entry.top_logprobs
    return TokenLogprobs(entry.logprob, entry.rank or 1, [one.token_id for one in top], [one.logprob for one in top])


def _num_tokens(given: Sequence[TokensResponse]) -> int:
    return sum(len(choice.token_ids or ()) for one in given for choice in one.choices)


def _work(given: Sequence[TokensResponse]) -> int:
    """Characters that are tokenised in the time that it takes to write these."""
    choices = [choice for one in given for choice in one.choices]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    num_logprobs = sum(1 + len(entry.top_logprobs) for entry in entries)
    return TOKEN * _num_tokens(given) + CHOICE * len(choices) + LOGPROB * num_logprobs


def _usage(given: Sequence[TokensResponse], prompt_tokens: Sequence[int]) -> dict[str, Any]:
    num_prompt, num_output = sum(prompt_tokens), _num_tokens(given)
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
