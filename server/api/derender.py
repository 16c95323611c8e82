"""POST /v1/chat/completions/derender, /v1/completions/derender: answers in token ids as text, in OpenAI's shape

Of a streamed answer each event is a request. The server keeps nothing between two of them: the client brings the tokens
that came before, and they are read again, which takes the time of a text that is as long as the context at most."""

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
from ..generation.choice import Choice, Delta, Prompt, TextOptions
from ..generation.sampling import check_tokens, text_options
from ..generation.speech import Speech
from ..http.tenant import tenant_of
from ..state import ServerState
from ..text.tokenizer import no_text
from ..wire.requests import ChatRequest, CompletionRequest
from ..wire.tokens_in import (
    Derender,
    DerenderChat,
    DerenderCompletions,
    DerenderState,
    SampledLogprob,
    TokensChoice,
    TokensEvent,
    TokensResponse,
)
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
    given, state = body.given, body.state
    asked = body.chat_request or ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}]})
    prompt, num_top, size = await work_on_body(
        request,
        lambda: (
            _prompt(server, given, body.prompt_token_ids, state), _num_logprobs([given]), _work([given], state)
        ),
    )  # fmt: skip
    if num_top is not None:
        asked.logprobs, asked.top_logprobs = True, max(num_top, asked.top_logprobs or 0)
    id, tokenizer = given.request_id or f"chatcmpl-{request.state.request_id}", server.model.tokenizer

    async def work() -> Response:
        text, speech = text_options(asked), Speech.of(asked, server.model)
        if speech is not None and body.chat_request is not None:
            _, text, _ = await speech.prepare(None, tenant_of(request.scope), [prompt], text, tokenizer)

        def answered() -> Response:
            if isinstance(given, TokensEvent):
                choices = [
                    chat.one_chunk(tokenizer, asked, choice, delta, opens=not state.role_sent)
                    for choice, delta in _deltas(server, given, prompt, text, state)
                ]
                head = {"id": id, "object": "chat.completion.chunk", "created": int(time.time()), "model": name}
                return _event(body, given, head | {"choices": choices}, body.prompt_tokens)
            said = {
                "id": id, "object": "chat.completion", "created": int(time.time()), "model": name,
                "choices": chat.choices(tokenizer, asked, _answers(server, given, prompt, text)),
                "usage": _usage(body.prompt_tokens or 0, _num_tokens([given])), **_NOTHING, "prompt_logprobs": None,
                "prompt_token_ids": None,
            }  # fmt: skip
            return json_answer(body.ignored, said)

        return await server.tokenise(size, answered)

    return await watched(request, work())


@router.post("/v1/completions/derender", response_class=Response)
async def derender_completions(request: Request) -> Response:
    """The completion that answers in token ids are, one for each prompt."""
    body = await read_request(DerenderCompletions, request)
    server, name = _server(request, body.model)
    given, state = body.each_given, body.state
    asked = body.completion_request or CompletionRequest.model_validate({"prompt": [[0]]})
    prompts, num_top, size = await work_on_body(
        request,
        lambda: (
            [_prompt(server, one, ids, state) for one, ids in zip(given, body.each_prompt, strict=True)],
            _num_logprobs(given),
            _work(given, state),
        ),
    )
    if num_top is not None:
        asked.logprobs = max(num_top, asked.logprobs or 0)
    id, tokenizer = given[0].request_id or f"cmpl-{request.state.request_id}", server.model.tokenizer

    def answered() -> Response:
        text = text_options(asked)
        head: dict[str, Any] = {"id": id, "object": "text_completion", "created": int(time.time()), "model": name}
        if isinstance(event := given[0], TokensEvent):
            deltas = _deltas(server, event, prompts[0], text, state)
            choices = [completions.one_chunk(tokenizer, asked, choice, delta) for choice, delta in deltas]
            return _event(body, event, head | {"choices": choices}, body.num_prompt_tokens)
        answers = [
            answer for one, prompt in zip(given, prompts, strict=True) for answer in _answers(server, one, prompt, text)
        ]
        written = [completions.one_choice(tokenizer, asked, answer, None, None) for answer in answers]
        head["choices"] = [{**choice, "index": index} for index, choice in enumerate(written)]
        usage = _usage(body.num_prompt_tokens or 0, _num_tokens(given))
        return json_answer(body.ignored, head | {"usage": usage} | _NOTHING)

    return await watched(request, server.tokenise(size, answered))


def _event(body: Derender, given: TokensEvent, chunk: dict[str, Any], num_prompt: int | None) -> Response:
    """`num_prompt`: tokens of the prompt, where the request says it."""
    if given.usage is not None:
        prompt_tokens = given.usage.prompt_tokens if num_prompt is None else num_prompt
        chunk["usage"] = _usage(prompt_tokens, given.usage.completion_tokens)
    state = body.state
    ids = [*state.output_token_ids, *(id for choice in given.choices for id in choice.token_ids or ())]
    after = {"output_token_ids": ids, "role_sent": state.role_sent or bool(given.choices)}
    return json_answer(body.ignored, {"chunk": chunk, "stream_state": after})


def _server(request: Request, model: str | None) -> tuple[ServerState, str]:
    """Raises ApiError (400, 404, 503)."""
    server = ServerState.of(request)
    name = server.model_name(model)
    server.engine_info()
    if server.model.tokenizer.missing:
        no_text("generate_response")
    return server, name


def _prompt(
    server: ServerState, given: TokensResponse, token_ids: Sequence[int] | None, state: DerenderState
) -> Prompt:
    """What the answer follows. Raises ApiError (400) for what this model could not have said."""
    info = server.client.info
    ids = token_ids if token_ids is not None else given.prompt_token_ids or []
    check_tokens("prompt_token_ids", ids, info)
    check_tokens("stream_state.output_token_ids", state.output_token_ids, info)
    for choice in given.choices:
        found, entries = choice.token_ids or [], (choice.logprobs.content if choice.logprobs else None) or []
        check_tokens("token_ids", found, info)
        if (num := len(found) + len(state.output_token_ids)) > info.max_model_len:
            message = f"'token_ids' has {num} entries, and the context {info.max_model_len}."
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
    for index, one in enumerate(given.choices):
        choice = text.choice(index, prompt, Mailbox(0, 0.0), server.model.tokenizer)
        made.append(choice)
        for output in _outputs(server, one, prompt, one.finish_reason or "stop"):
            collected.add(choice, choice.feed(output))
    return collected.answers()


def _deltas(
    server: ServerState, given: TokensEvent, prompt: Prompt, text: TextOptions, state: DerenderState
) -> list[tuple[Choice, Delta]]:
    """What the event adds to its choice, if it is about one."""
    found = []
    for one in given.choices:
        choice = text.choice(0, prompt, Mailbox(0, 0.0), server.model.tokenizer)
        if state.output_token_ids:
            choice.feed(RequestOutput(0, state.output_token_ids, None))
        if choice.finish_reason is not None:
            raise bad_request("The choice ended with a stop string before this event.", "generate_chunk")
        added = Collected([choice])
        for output in _outputs(server, one, prompt, one.finish_reason):
            added.add(choice, choice.feed(output))
        (answer,) = added.answers()
        choice.index = one.index
        found.append((choice, answer.delta))
    return found


def _outputs(server: ServerState, one: TokensChoice, prompt: Prompt, finish: str | None) -> list[RequestOutput]:
    """As the engine would have said it. `finish`: None where the answer goes on."""
    ids, entries = one.token_ids or [], one.logprobs.content if one.logprobs else None
    logprobs = None if prompt.sampling.logprobs is None else [_logprobs(entry) for entry in entries or ()]
    if logprobs is not None and len(logprobs) != len(ids):
        logprobs = [TokenLogprobs(0.0, 1, [], [])] * len(ids)
    ended = bool(ids) and finish == "stop" and ids[-1] in server.model.eos_token_ids
    outputs = [RequestOutput(0, ids, finish if ended else None, None, logprobs)]
    if not ended and finish is not None:  # a stop string, which stays, or a limit: no token ends it
        outputs.append(RequestOutput(0, [], finish, None, None if logprobs is None else []))
    return outputs


def _logprobs(entry: SampledLogprob) -> TokenLogprobs:
    top = entry.top_logprobs
    return TokenLogprobs(entry.logprob, entry.rank or 1, [one.token_id for one in top], [one.logprob for one in top])


def _num_tokens(given: Sequence[TokensResponse]) -> int:
    return sum(len(choice.token_ids or ()) for one in given for choice in one.choices)


def _work(given: Sequence[TokensResponse], state: DerenderState) -> int:
    """Characters that are tokenised in the time that it takes to write these."""
    choices = [choice for one in given for choice in one.choices]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    num_logprobs = sum(1 + len(entry.top_logprobs) for entry in entries)
    return TOKEN * (_num_tokens(given) + len(state.output_token_ids)) + CHOICE * len(choices) + LOGPROB * num_logprobs


def _usage(num_prompt: int, num_output: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
