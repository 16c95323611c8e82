"""Where an engine runs: in a process of its own, of another API process, of another of torchrun's, or in this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...engine.errors import ConfigError
from ...engine.link.messages import Failure, ToEngine
from ...engine.options.config import EngineConfig
from ...engine.start.process import run_engine
from .launched import LaunchedEngine
from .meeting import EngineLink, Meeting
from .process import EngineProcess

logger = logging.getLogger(__name__)

OnMessage = Callable[[Any], None]
OnLost = Callable[[str], None]  # gets the cause in one line, once, when the engine is gone without having been asked to


class Engine(Protocol):
    """One, from its start to its end."""

    @property
    def send(self) -> Callable[[ToEngine], None]: ...

    async def start(self, config: EngineConfig, variables: Mapping[str, str] = {}) -> None:
        """Returns long before it can serve. `variables`: of its environment, where it has one of its own. Raises
        OSError when it could not be started."""
        ...

    def is_stopped(self) -> bool:
        """As far as is known: nothing that it is told means anything to it now."""
        ...

    def is_suspended(self) -> bool:
        """By a signal."""
        ...

    def dump_stacks(self) -> None:
        """Of its threads, to stderr."""
        ...

    def kill(self) -> None: ...

    async def end(self) -> None:
        """Idempotent; afterwards there is none."""
        ...


def make_engine(
    config: EngineConfig, meeting: Meeting | None, index: int, on_message: OnMessage, on_lost: OnLost,
    killed: Callable[[], str],
) -> Engine:  # fmt: skip
    """The one that the options, and what this process is, ask for. See EngineClient, EngineProcess."""
    if config.node_rank:
        return LaunchedEngine(on_message, on_lost)
    if config.engine_in_process:
        return LocalEngine(on_message, on_lost)
    if meeting is None:
        return EngineProcess(on_message, on_lost, killed)
    if meeting.is_first:
        return EngineProcess(on_message, on_lost, killed, meeting.listener(index))
    return EngineLink(meeting.engine_path(index), meeting.client, on_message, on_lost)


class LocalEngine:
    """On the event loop of this process."""

    def __init__(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._task: asyncio.Task[None] | None = None
        self._submit: Callable[[ToEngine], None] | None = None

    async def start(self, config: EngineConfig, variables: Mapping[str, str] = {}) -> None:
        self._task = asyncio.create_task(self._run(config))

    def send(self, message: ToEngine) -> None:
        assert self._submit is not None, "the engine is not ready"
        self._submit(message)

    def is_stopped(self) -> bool:
        return False

    is_suspended = is_stopped

    def dump_stacks(self) -> None:
        """Whoever asks for them shows those of this process too."""

    def kill(self) -> None:
        """It ends with this process."""

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task

    def _attach(self, submit: Callable[[ToEngine], None]) -> None:
        self._submit = submit

    async def _run(self, config: EngineConfig) -> None:
        try:
            await run_engine(config, self._on_message, self._attach)
        except ConfigError as error:
            self._on_message(Failure(str(error), is_refusal=True))
        except Exception as error:
            logger.debug("engine failed", exc_info=error)
            self._on_lost(str(error) or type(error).__name__)
