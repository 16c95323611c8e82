"""The way that chat and completions share: tokens, engine requests, then a stream or one body."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response

from ...engine.plan import TokenLogprobs
from ..admission import CHARACTERS_PER_TOKEN
from ..choice import Choice, Delta, Prompt
from ..errors import shorten
from ..generation import Generation, unless_disconnected
from ..logprobs import LogprobFormat, PromptReport, prompt_report
from ..middleware import clean_id
from ..parsers.parts import Part, append
from ..protocol import ChatRequest, CompletionRequest
from ..sampling import resolve, text_options
from ..speech import Speech
from ..sse import Events, EventStream, events
from ..state import ServerState

IGNORED_HEADER = "x-vserve-ignored-params"
Told = TypeVar("Told", bound=Events)
SLOW_ENTRY = 8  # an entry of log-probabilities costs about as much as so many characters of a prompt


@dataclass
class Answer:
    """Everything that one choice said."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)  # where reasoning and tool calls are told from the text

    @property
    def delta(self) -> Delta:
        parts, finish = self.parts or None, self.choice.finish_reason
        return Delta(self.text, self.token_ids, self.logprobs, self.offsets, finish, parts)


class Head(NamedTuple):
    """What an answer says of itself."""

    id: str
    created: int  # Unix time
    model: str


async def respond(
    request: Request,
    body: ChatRequest | CompletionRequest,
    *,
    id_prefix: str,
    tokenise: Callable[[], Awaitable[list[list[int]]]],
    echo: Callable[[int, list[int]], str] | None,
    default_max_tokens: int | None,
    chunks: Callable[[Generation, Head], Events],
    full: Callable[[Generation, list[Answer], Head], dict[str, Any]],
    speech: Speech | None = None,
) -> Response:
    """Answers a validated request. `echo`: what the answers to a prompt (its index, its tokens) begin with; `full`
    makes an answer that is not streamed; `speech`: where there may be more than text.
    """
    arrival = time.monotonic()
    server = ServerState.of(request)
    info = server.engine_info()
    name = server.model_name(body.model)
    if body.request_id is not None and "x-request-id" not in request.headers:
        request.state.request_id = clean_id(body.request_id)
    request_id = request.state.request_id
    head = Head(id_prefix + request_id, int(time.time()), name)
    headers = {IGNORED_HEADER: header_list(body.ignored)} if body.ignored else {}

    text = text_options(body)

    def describe(prompt: Prompt, entries: list[TokenLogprobs]) -> Awaitable[PromptReport]:
        form = LogprobFormat.of(body) if isinstance(body, CompletionRequest) and body.echo else None
        work = partial(prompt_report, server.model.tokenizer, prompt, entries, text, body.prompt_logprobs, form)
        return server.tokenise(SLOW_ENTRY * len(entries), work)

    num_prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
    # Not more than a guess: it is let in, or not, before it is tokenised.
    num_tokens = len(await request.body()) // CHARACTERS_PER_TOKEN
    ticket = server.admission.admit(num_prompts * (body.n or 1), num_tokens, arrival)
    request.state.ticket = ticket  # released when the request is over, however it ends

    async def begin() -> tuple[Generation, AsyncIterator[tuple[Choice, Delta]], tuple[Choice, Delta]]:
        """Returns once the engine has said something: until then an error can still be a status code."""
        prompts = resolve(body, await tokenise(), server.model, info, default_max_tokens)
        if echo is not None:
            num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            prompts = await server.tokenise(4 * num_tokens, partial(_echoed, prompts, echo))
        ticket.settle(sum(len(prompt.token_ids) for prompt in prompts))
        on_close = key = None
        options = text
        if speech is not None:
            grammars = server.grammars if speech.is_constrained else None
            prompts[0], options, key = await speech.prepare(grammars, prompts[0], text, server.model.tokenizer)
        elif body.constraint is not None:
            key = await server.grammars.acquire(body.constraint[1], body.constraint[0])
            prompts = [prompt.with_grammar(key) for prompt in prompts]
        if key is not None:
            on_close = partial(server.grammars.release, key)
        generation = Generation(
            server.client,
            server.metrics,
            server.model.tokenizer,
            prompts,
            arrival=arrival,
            n=body.n or 1,
            text=options,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            describe=None if body.num_prompt_logprobs is None else describe,
            on_close=on_close,
        )
        server.generations[generation] = request_id
        request.state.generation = generation  # for whoever looks at the request when it is over
        ticket.watch(generation)
        try:
            deltas = generation.deltas()
            if server.request_log.prompts:
                server.request_log.prompt(request_id, generation, server.model.tokenizer)
            if server.request_log.outputs:
                deltas = server.request_log.listen(request_id, deltas)
            return generation, deltas, await anext(deltas)
        except BaseException:
            generation.close()
            raise

    async def collect() -> tuple[Generation, list[Answer]]:
        generation, deltas, (choice, delta) = await begin()
        try:
            answers = [Answer(choice) for choice in generation.choices]
            texts: list[list[str]] = [[] for _ in answers]
            while True:
                answer = answers[choice.index]
                texts[choice.index].append(delta.text)
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs or ()
                answer.offsets += delta.offsets or ()
                for part in delta.parts or ():
                    append(answer.parts, part)
                following = await anext(deltas, None)
                if following is None:
                    break
                choice, delta = following
            for answer, pieces in zip(answers, texts, strict=True):
                answer.text = "".join(pieces)
            return generation, answers
        finally:
            generation.close()

    if body.stream:
        generation, deltas, first = await unless_disconnected(request.receive, begin())
        encoder = chunks(generation, head)
        stream = events(generation, encoder, first, deltas, request_id)
        return EventStream(stream, generation.close, headers, server.config.sse_ping_interval)
    generation, answers = await unless_disconnected(request.receive, collect())

    def encode() -> bytes:
        return msgspec.json.encode(full(generation, answers, head))

    num_entries = sum(len(answer.logprobs) for answer in answers)
    content = await server.tokenise(SLOW_ENTRY * num_entries, encode)
    return Response(content, headers=headers, media_type="application/json")


def told(events: Told, answers: list[Answer]) -> Told:
    """The events of an answer that is not streamed, after they have added it up; it has one choice."""
    (answer,) = answers
    events.delta(answer.choice, answer.delta)
    events.closing()
    return events


def _echoed(prompts: list[Prompt], echo: Callable[[int, list[int]], str]) -> list[Prompt]:
    return [replace(prompt, echo=echo(i, prompt.token_ids)) for i, prompt in enumerate(prompts)]


def header_list(names: list[str]) -> str:
    """Names as a header may hold them."""
    safe = [re.sub(r"[^A-Za-z0-9_.-]", "?", shorten(name)) for name in names[:20]]
    return ", ".join(safe if len(names) <= 20 else [*safe, "..."])
