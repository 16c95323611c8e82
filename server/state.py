"""What every handler needs, in one place: `request.app.state.server`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from fastapi import Request

from ..engine.link.messages import EngineInfo
from .batches.batches import Batches
from .client.client import Client
from .colleagues import Colleagues
from .dialects.store import Store
from .errors import engine_dead, model_not_found, shutting_down, still_loading
from .generation.adapters import Adapters
from .generation.admission import Admission
from .generation.generation import Generation
from .generation.tasks import GENERATE
from .http.middleware import HttpMetrics
from .lanes import Lanes
from .media.pictures import Pictures
from .observe.exposition import MetricsPage
from .observe.metrics import Metrics
from .observe.request_log import RequestLog
from .observe.step_feeds import StepFeeds
from .options.config import ServerConfig
from .text.encoding import Encoder
from .text.model import TextModel
from .text.pairs import PairEncoder

if TYPE_CHECKING:
    from .grammar.service import GrammarService

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Below, tokenising takes less than a millisecond: about what handing it to a busy thread costs.
INLINE_CHARACTERS = 2048


ENCODER_CACHE = "mm_encoder_cache_tokens"  # of the engine's settings; 0: nothing looks at pictures
SMALLEST_BODY, BYTES_PER_TOKEN = 8 << 20, 64  # a limit of bodies, where none is set
MOST_IN_PICTURES = 256 << 20  # what it is raised by where the model sees pictures


@dataclass
class ServerState:
    client: Client
    config: ServerConfig
    model: TextModel
    metrics: Metrics
    metrics_page: MetricsPage
    http_metrics: HttpMetrics
    request_log: RequestLog
    admission: Admission
    lanes: Lanes  # for tokenising, and whatever else takes long
    sources: dict[str, str] = field(default_factory=dict)  # where settings are from that are no defaults
    # what is being generated: the request's id, and its owner, as auth.owner_of has it
    generations: WeakKeyDictionary[Generation, tuple[str, str]] = field(default_factory=WeakKeyDictionary)
    draining: bool = False  # told to end: what runs is finished, nothing new begins
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # that go on when their request is over
    # What is read again when told to, by name; each raises ConfigError, and then leaves things as they were.
    reloads: dict[str, Callable[[], None]] = field(default_factory=dict)
    colleagues: Colleagues | None = None  # other API processes of this server
    started: int = field(default_factory=lambda: int(time.time()))
    beside: ServerState | None = None  # of the second model, where there is one
    pictures: Pictures | None = None  # where the model sees any

    @cached_property
    def bodies(self) -> Lanes:
        """For reading large bodies: one at a time, since that is Python's work, and one of less beside it."""
        return Lanes(2, lambda: self.metrics.rejected("queued_text"), what="read")

    @cached_property
    def grammars(self) -> GrammarService:
        """Made by the first request for structured output, or once the server is idle: the start does not load it."""
        from .grammar.service import GrammarService

        service = GrammarService(self.client, self.model, timeout=self.config.grammar_compile_timeout)
        self.metrics.grammars = service
        return service

    @cached_property
    def adapters(self) -> Adapters:
        folder, engine = self.config.lora_dir, self.client.config
        tell = None if self.colleagues is None or not self.is_first else self.colleagues.tell
        names = [name for state in self.states for name in state.model.names]
        return Adapters(self.client, names, enabled=engine.enable_lora, folder=folder, tell=tell)

    @cached_property
    def pairs(self) -> PairEncoder:
        """Once the engine is there, which says whether it reranks."""
        return PairEncoder(self.model.tokenizer, self.client.info.reranks, self.model.pooling.prefix)

    @cached_property
    def step_feeds(self) -> StepFeeds:
        return StepFeeds(self.client)

    @cached_property
    def responses(self) -> Store:
        return Store(self.config.response_store_size, self.config.response_store_bytes)

    @cached_property
    def conversations(self) -> Store:
        return Store(self.config.response_store_size, self.config.response_store_bytes)

    @cached_property
    def chats(self) -> Store:
        return Store(self.config.response_store_size, self.config.response_store_bytes)

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.config)

    @property
    def is_first(self) -> bool:
        """Of the API processes, which keeps what there is one of."""
        return self.colleagues is None or self.colleagues.meeting.is_first

    @staticmethod
    def of(request: Request) -> ServerState:
        state = request.app.state.server
        assert isinstance(state, ServerState)
        return state

    @property
    def states(self) -> tuple[ServerState, ...]:
        """Of each model."""
        return (self,) if self.beside is None else (self, self.beside)

    def named(self, asked: str | None) -> ServerState:
        """Of the model with that name; without a name, and for one that none has, of the first."""
        return next((state for state in self.states if asked in state.model.names), self)

    def serving(self, asked: str | None, tasks: tuple[str, ...]) -> ServerState:
        """Of the model that a request is for; without a name, what is no text is the second model's."""
        if asked is None and self.beside is not None and GENERATE not in tasks:
            return self.beside
        return self.named(asked)

    def sees(self, asked: str | None) -> bool:
        """Whether the model with that name sees pictures. What looks at them may be missing in its files, which the
        engine alone reads."""
        state = self.named(asked)
        return state.pictures is not None and state.client.info.settings.get(ENCODER_CACHE) != 0

    def waits(self) -> bool:
        """Whether an engine is on its way, the first one or another."""
        return any(not state.client.ready and state.client.dead is None for state in self.states)

    def engine_info(self) -> EngineInfo:
        """Raises ApiError (503) unless the engine can serve."""
        client = self.client
        if not client.ready:
            self.metrics.rejected("engine_down" if client.dead or client.down else "loading")
            if client.dead is not None or client.down is not None:
                raise engine_dead(client.dead or client.down or "", client.retry_after)
            raise still_loading(client.phase.phase if client.phase else "starting")
        if self.draining:
            self.metrics.rejected("draining")
            raise shutting_down()
        return self.client.info

    def reload(self) -> list[str]:
        """Reads keys and certificates again, those that there are: their names. Raises ConfigError, and then those
        from the one on that cannot be read are as they were."""
        for reload in self.reloads.values():
            reload()
        logger.info("read again: %s", ", ".join(self.reloads) or "nothing, there are no files of keys or certificates")
        return list(self.reloads)

    def max_body_size(self) -> int:
        """Bytes of a request's body."""
        if (limit := self.config.max_body_size) is not None:
            return limit
        in_pictures = 0
        if self.pictures is not None:
            each = self.config.max_media_size * 4 // 3  # as base64
            in_pictures = min(MOST_IN_PICTURES, self.config.most_pictures() * each)
        return max(SMALLEST_BODY, BYTES_PER_TOKEN * self.client.info.max_model_len) + in_pictures

    def model_name(self, asked: str | None) -> str:
        """The name for the answer. Raises ApiError (404)."""
        if asked is None:
            return self.model.names[0]
        if asked not in self.model.names and self.adapters.find(asked) is None:
            raise model_not_found(asked, [name for state in self.states for name in state.offered_names()])
        return asked

    def offered_names(self) -> list[str]:
        """The model's first name, and its adapters."""
        return [self.model.names[0], *(adapter.name for adapter in self.adapters)]

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """(Adapters of requests that the engine has begun, of those that wait), by name."""
        names = {adapter.id: adapter.name for adapter in self.adapters}
        begun: tuple[set[str], set[str]] = set(), set()
        for generation in self.generations:
            name = names.get(generation.prompts[0].sampling.adapter)
            if name is not None and not generation.closed:
                waits = all(choice.first_token is None for choice in generation.choices)
                begun[waits].add(name)
        return sorted(begun[False]), sorted(begun[True])

    def refused(self, reason: str) -> None:
        """A connection was ended by the server, before its request came this far or beside it."""
        self.http_metrics.refusals[reason] += 1
        if reason == "stalled_reader":
            self.metrics.timed_out("write")

    async def encode(
        self, num_characters: int, encoder: Encoder, prompts: Sequence[str | list[int]], special: bool
    ) -> list[list[int]]:
        """The token ids of prompts, of whose texts there are so many characters. Raises ApiError (400)."""
        if num_characters <= INLINE_CHARACTERS:
            encode = self.model.tokenizer.encode
            return [encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in prompts]
        return await encoder.encode_all(prompts, special)

    async def tokenise(self, num_characters: int, work: Callable[[], T], slow: bool = False) -> T:
        """The result of `work`, off the event loop where that pays, or where it may take long anyway."""
        if num_characters <= INLINE_CHARACTERS and not slow:
            return work()
        return await self.lanes.run(num_characters, work)
