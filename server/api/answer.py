"""The way that chat and completions share: tokens, engine requests, then a stream or one body."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Request, Response

from ..errors import shorten
from ..generation import Choice, Delta, Generation, unless_disconnected
from ..protocol import ChatRequest, CompletionRequest
from ..sampling import resolve
from ..sse import Chunks, EventStream, events
from ..state import ServerState

IGNORED_HEADER = "x-vserve-ignored-params"


@dataclass
class Answer:
    """Everything that one choice said."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    @property
    def delta(self) -> Delta:
        return Delta(self.text, self.token_ids, self.logprobs, self.offsets, self.choice.finish_reason)


async def respond(
    request: Request,
    body: ChatRequest | CompletionRequest,
    *,
    id_prefix: str,
    tokenise: Callable[[], Awaitable[list[list[int]]]],
    default_max_tokens: int | None,
    chunks: type[Chunks],
    full: Callable[[ServerState, list[Answer]], dict[str, Any]],
) -> Response:
    """Answers a validated request. `full` makes the choices and further fields of an answer that is not streamed."""
    arrival = time.monotonic()
    server = ServerState.of(request)
    info = server.engine_info()
    name = server.model_name(body.model)
    request_id = request.state.request_id
    id, created = f"{id_prefix}-{request_id}", int(time.time())
    headers = {IGNORED_HEADER: header_list(body.ignored)} if body.ignored else {}

    async def begin() -> tuple[Generation, AsyncIterator[tuple[Choice, Delta]], tuple[Choice, Delta]]:
        """Returns once the engine has said something: until then an error can still be a status code."""
        prompts = resolve(body, await tokenise(), server.model, info, default_max_tokens)
        generation = Generation(
            server.client,
            server.metrics,
            server.model.tokenizer,
            prompts,
            arrival=arrival,
            n=body.n or 1,
            stops=body.stop or (),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        try:
            deltas = generation.deltas()
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
        encoder = chunks(
            generation,
            server.model.tokenizer,
            id=id,
            created=created,
            model=name,
            include_usage=body.include_usage,
            num_logprobs=body.num_logprobs,
            token_ids=bool(body.return_token_ids),
        )
        stream = events(generation, encoder, first, deltas, request_id)
        return EventStream(stream, generation.close, headers, server.config.sse_ping_interval)
    generation, answers = await unless_disconnected(request.receive, collect())
    content = {"id": id, "object": "", "created": created, "model": name, **full(server, answers)}
    content["usage"] = generation.usage()
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")


def header_list(names: list[str]) -> str:
    """Names as a header may hold them."""
    safe = [re.sub(r"[^A-Za-z0-9_.-]", "?", shorten(name)) for name in names[:20]]
    return ", ".join(safe if len(names) <= 20 else [*safe, "..."])
