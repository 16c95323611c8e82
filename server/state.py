"""What every handler needs, in one place: `request.app.state.server`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request

from ..engine.messages import EngineInfo
from .config import ServerConfig
from .errors import engine_dead, model_not_found, still_loading
from .generation import Client
from .metrics import Metrics
from .middleware import HttpMetrics
from .tokenizer import TextModel

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
    started: int = field(default_factory=lambda: int(time.time()))
    # Few threads: tokenising competes with the event loop and, on the CPU, with the model itself.
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=4, thread_name_prefix="tokenise")
    )

    @staticmethod
    def of(request: Request) -> ServerState:
        state = request.app.state.server
        assert isinstance(state, ServerState)
        return state

    def engine_info(self) -> EngineInfo:
        """Raises ApiError (503) unless the engine can serve."""
        if self.client.dead is not None:
            raise engine_dead(self.client.dead)
        if not self.client.ready:
            raise still_loading(self.client.phase.phase if self.client.phase else "starting")
        return self.client.info

    def model_name(self, asked: str | None) -> str:
        """The name for the answer. Raises ApiError (404)."""
        if asked is None:
            return self.model.names[0]
        if asked not in self.model.names:
            raise model_not_found(asked)
        return asked

    async def tokenise(self, num_characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, off the event loop where that pays."""
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)
