"""What an API makes of a request, in the order it happens: a body, prompts, then events or a whole answer.

answer.py leads a request through it. A dialect is made by its route once the body is validated; `Generating` is what
those share that generate text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request, Response

from ...engine.link.media import MediaItem
from ...engine.link.plan import TokenLogprobs
from ..dialects.events import Events
from ..errors import unsupported
from ..generation.admission import Ticket
from ..generation.answer import Answer
from ..generation.choice import Choice, Delta, Prompt, TextOptions
from ..generation.generation import Generation
from ..generation.logprobs import LogprobFormat, PromptReport, prompt_report
from ..generation.quota import Charge
from ..generation.sampling import answer_in_ids, resolve, resolving_size, text_options
from ..generation.speech import Speech
from ..generation.tasks import GENERATE
from ..generation.weight import check_weight, most_bytes
from ..http.tenant import tenant_of
from ..media.source import num_bytes, without
from ..state import ServerState
from ..text.shape import text_of
from ..wire.encoded import encode
from ..wire.pooled import PooledRequest
from ..wire.requests import ChatRequest, CompletionRequest, StreamOptions
from .ignored import ignored_headers
from .tokens import ChatPrompt, chat_tokens

SLOW_CHOICE = 64  # characters of a prompt that cost about as much as one of many answers
MUCH_TEXT = 16 << 10  # bytes of a body in which pictures are looked for
SLOW_ENTRY = 8  # an entry of log-probabilities costs about as much as so many characters of a prompt

Deltas = AsyncIterator[tuple[Choice, Delta]]


class Head(NamedTuple):
    """What an answer says of itself."""

    id: str
    created: int  # Unix time
    model: str


class Ready(NamedTuple):
    """What is submitted."""

    prompts: Sequence[Prompt]
    text: TextOptions
    grammar: str | None = None  # the key of one that is held for this request, to be released when it is over


class Load(NamedTuple):
    """What a request brings to the queue."""

    num_requests: int  # of the engine
    num_tokens: int  # of its prompts
    param: str  # the field that says so many


class Dialect(ABC):
    id_prefix = ""
    tasks: tuple[str, ...] = (GENERATE,)  # what the model must do, one of these
    streams = False
    in_background = False  # it goes on when the request is over
    n = 1  # choices of each prompt

    def __init__(self, request: Request, body: ChatRequest | CompletionRequest | PooledRequest) -> None:
        """`body`: the request in words that the engine's side knows, whatever the API's own are."""
        self.request = request
        self.server = ServerState.of(request).serving(body.model, self.tasks)
        self.body = body
        self.charge: Charge | None = None  # to the key that the request has brought
        # What the answer says of each prompt's tokens, where it was asked for: there before its first delta.
        self.reports: list[PromptReport | None] = []

    @property
    @abstractmethod
    def num_prompts(self) -> int: ...

    def load(self, num_tokens: int) -> Load:
        """`num_tokens`: of all prompts, a guess until they are tokenised."""
        num_choices = self.num_prompts * self.n
        return Load(num_choices, num_tokens, "n" if self.n > 1 else "prompt")

    @abstractmethod
    async def prompts(self) -> Sequence[Prompt]:
        """Tokenised, and with everything that the engine is to do. Raises ApiError (400)."""

    @abstractmethod
    async def prepare(self, prompts: Sequence[Prompt]) -> Ready:
        """What may take long, or hold something: once it is known that the prompts may queue. Raises ApiError."""

    async def describe(self, generation: Generation, index: int, entries: Sequence[TokenLogprobs]) -> None:
        """Fills `reports[index]`: `entries` are of the prompt's tokens 1 …"""
        raise NotImplementedError

    def events(self, generation: Generation, head: Head) -> Events:
        """Where `streams`."""
        raise NotImplementedError

    def detach(self, generation: Generation, head: Head, deltas: Deltas, ticket: Ticket) -> Response:
        """Where `in_background`: has the answer made, the ticket released when it is there, and says how to get it."""
        raise NotImplementedError

    @abstractmethod
    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        """The answer that is not streamed. May be called on a thread."""

    def respond(self, generation: Generation, answers: Sequence[Answer], head: Head) -> Response:
        """`whole` as it is sent. May be called on a thread."""
        content = encode(self.whole(generation, answers, head))
        return Response(content, headers=dict(self.headers), media_type="application/json")

    async def settle(self) -> None:
        """What is left to do once the answer is there, before it is sent."""
        return

    def slowness(self, answers: Sequence[Answer]) -> int:
        """Characters of a prompt that are tokenised while the answer is made and encoded."""
        num_entries = sum(len(answer.logprobs) for answer in answers)
        return SLOW_ENTRY * num_entries + SLOW_CHOICE * (len(answers) - 1)

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer, beside those that every answer has."""
        return ignored_headers(self.body.ignored)


class Generating(Dialect):
    """What makes text of prompts."""

    body: ChatRequest | CompletionRequest
    default_max_tokens: int | None = None  # None: what is left of the context

    def __init__(self, request: Request, body: ChatRequest | CompletionRequest) -> None:
        super().__init__(request, body)
        config = self.server.config
        if config.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = True
        if config.enable_force_include_usage and body.stream:
            asked = {} if body.stream_options is None else body.stream_options.model_dump()
            forced = {"include_usage": True, "continuous_usage_stats": True}
            body.stream_options = StreamOptions.model_validate({**asked, **forced})
        self.streams = bool(body.stream)
        self.n = body.n or 1
        self.media: list[tuple[MediaItem, ...]] = []  # of each prompt, where any has some; `tokens` fills it
        self.text = answer_in_ids(body) if self.server.model.tokenizer.missing else text_options(body)

    @abstractmethod
    async def tokens(self) -> list[list[int]]:
        """The ids of each prompt. Raises ApiError (400)."""

    def echo(self, index: int, token_ids: Sequence[int]) -> str:
        """What the answers to a prompt begin with, where the body asks for an echo."""
        raise NotImplementedError

    async def prompts(self) -> Sequence[Prompt]:
        body, server = self.body, self.server
        token_ids = await self.tokens()
        work = partial(resolve, body, token_ids, server.model, server.client.info, self.default_max_tokens)
        prompts = await server.tokenise(resolving_size(body, token_ids), work)
        if any(self.media):
            if body.truncate_prompt_tokens is not None:
                raise unsupported("truncate_prompt_tokens", "'truncate_prompt_tokens' with pictures")
            prompts = [replace(prompt, media=media) for prompt, media in zip(prompts, self.media, strict=True)]
        if body.echo:
            num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            prompts = await server.tokenise(4 * num_tokens, partial(self._echoed, prompts))
        self._check_weight(prompts)
        return prompts

    @property
    def keeps_answer(self) -> bool:
        """Whether all of it is in memory at its end."""
        return not self.streams

    def _check_weight(self, prompts: Sequence[Prompt]) -> None:
        """Raises ApiError (400) for an answer that might be more than the server keeps."""
        body = self.body
        repeats = self.keeps_answer and bool(body.echo or body.return_token_ids)
        name, asked = body.token_limit
        param = "n" if self.n > 1 else name if asked is not None else "prompt" if len(prompts) > 1 else name
        most = most_bytes(self.server.config.max_answer_bytes, self.server.client.info)
        check_weight(prompts, self.n, most, keeps_answer=self.keeps_answer, repeats_prompt=repeats, param=param)

    def _echoed(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [replace(prompt, echo=self.echo(i, prompt.token_ids)) for i, prompt in enumerate(prompts)]

    async def prepare(self, prompts: Sequence[Prompt]) -> Ready:
        if self.body.constraint is None:
            return Ready(prompts, self.text)
        param, constraint = self.body.constraint
        key = await self.server.grammars.acquire(constraint, param, tenant_of(self.request.scope))
        return Ready([prompt.with_grammar(key) for prompt in prompts], self.text, key)

    async def describe(self, generation: Generation, index: int, entries: Sequence[TokenLogprobs]) -> None:
        body, tokenizer = self.body, self.server.model.tokenizer
        form = LogprobFormat.of(body) if isinstance(body, CompletionRequest) and body.echo else None
        prompt = generation.prompts[index]
        work = partial(prompt_report, tokenizer, prompt, entries, self.text, body.prompt_logprobs, form)
        self.reports[index] = await self.server.tokenise(SLOW_ENTRY * len(entries), work)


class Chatting(Generating):
    """What amounts to a chat: one prompt, and answers that may be more than text."""

    body: ChatRequest

    @property
    def num_prompts(self) -> int:
        return 1

    def __init__(self, request: Request, chat: ChatRequest) -> None:
        """Raises ApiError (400) for what the model cannot do."""
        super().__init__(request, chat)
        state = request.state
        if state.body_size > MUCH_TEXT and (in_pictures := num_bytes(chat.messages)):
            # They are no text: they bring no tokens by the byte, and cost nothing to render.
            state.body_size = max(0, state.body_size - in_pictures)
            state.body_work = max(0, state.body_work - (in_pictures >> 2))
        self.speech = Speech.of(chat, self.server.model)

    async def tokens(self) -> list[list[int]]:
        chat, fits = self.body, self.body.truncate_prompt_tokens is None
        return self._taken(await chat_tokens(self.request, chat, self.conversation, fits=fits))

    def _taken(self, prompt: ChatPrompt) -> list[list[int]]:
        # The other messages, and what pictures are made of, are not kept for as long as the answer takes.
        self.body.messages = without(self.body.messages[-1:])
        self.media = [prompt.media]
        return [prompt.token_ids]

    def conversation(self) -> list[dict[str, Any]]:
        """All messages, of which the body may have a part. Takes as long as there are many."""
        return self.body.messages

    def echo(self, index: int, token_ids: Sequence[int]) -> str:
        """The message that the answer goes on from."""
        final: dict[str, Any] = self.body.messages[-1]
        return text_of(final["content"]) if final["role"] == "assistant" else ""

    async def prepare(self, prompts: Sequence[Prompt]) -> Ready:
        if self.speech is None:
            return await super().prepare(prompts)
        grammars = self.server.grammars if self.speech.is_constrained else None
        owner, tokenizer = tenant_of(self.request.scope), self.server.model.tokenizer
        prompts, text, key = await self.speech.prepare(grammars, owner, prompts, self.text, tokenizer)
        return Ready(prompts, text, key)
