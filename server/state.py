"""What every handler needs, in one place: `request.app.state.server`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from fastapi import Request

from ..engine.messages import EngineInfo
from .admission import Admission
from .config import ServerConfig
from .dialects.response_store import ResponseStore
from .errors import engine_dead, model_not_found, shutting_down, still_loading
from .generation import Client, Generation
from .metrics import Metrics
from .middleware import HttpMetrics
from .request_log import RequestLog
from .tokenizer import TextModel

if TYPE_CHECKING:
    from .grammar import GrammarService

T = TypeVar("T")

# Below, tokenising takes less than a millisecond: about what handing it to a busy thread costs.
INLINE_CHARACTERS = 2048


@dataclass
class ServerState:
    client: Client
    config: ServerConfig
    model: TextModel
    metrics: Metrics
    http_metrics: HttpMetrics
    request_log: RequestLog
    admission: Admission
    sources: dict[str, str] = field(default_factory=dict)  # where settings are from that are no defaults
    generations: WeakKeyDictionary[Generation, str] = field(default_factory=WeakKeyDictionary)  # and the request's id
    draining: bool = False  # told to end: what runs is finished, nothing new begins
    started: int = field(default_factory=lambda: int(time.time()))
    # Few threads: tokenising competes with the event loop and, on the CPU, with the model itself.
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=4, thread_name_prefix="tokenise")
    )

    @cached_property
    def grammars(self) -> GrammarService:
        """Made when the first request asks for structured output: until then none of it is loaded."""
        from .grammar import GrammarService

        service = GrammarService(self.client, self.model, timeout=self.config.grammar_compile_timeout)
        self.metrics.grammars = service
        return service

    @cached_property
    def responses(self) -> ResponseStore:
        return ResponseStore(self.config.response_store_size, self.config.response_store_bytes)

    @staticmethod
    def of(request: Request) -> ServerState:
        state = request.app.state.server
        assert isinstance(state, ServerState)
        return state

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

    def model_name(self, asked: str | None) -> str:
        """The name for the answer. Raises ApiError (404)."""
        if asked is None:
            return self.model.names[0]
        if asked not in self.model.names:
            raise model_not_found(asked, self.model.names[0])
        return asked

    def refused(self, reason: str) -> None:
        """A connection was ended by the server, before its request came this far or beside it."""
        self.http_metrics.refusals[reason] += 1
        if reason == "stalled_reader":
            self.metrics.timed_out("write")

    async def tokenise(self, num_characters: int, work: Callable[[], T], slow: bool = False) -> T:
        """The result of `work`, off the event loop where that pays, or where it may take long anyway."""
        if num_characters <= INLINE_CHARACTERS and not slow:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)
