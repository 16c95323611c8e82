"""The engine's client on an event loop on a thread of its own, so that it works beside any event loop of the caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from ...engine.link.messages import Progress
from ...engine.options.config import EngineConfig
from .replicas import make_client

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """Whoever makes one must close it."""

    def __init__(self, config: EngineConfig, environment: Mapping[str, str] = {}) -> None:
        """`environment`: of the engine's process, beside this one's; where there is one engine."""
        self.client = make_client(config, environment=environment)  # for coroutines on the thread only
        self.client.progress_listeners.append(_log_phases())
        self.closing: list[Callable[[], Coroutine[Any, Any, None]]] = []  # what else ends with the engine
        try:
            import uvloop

            self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        except ImportError:
            self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="vserve-llm", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """What becomes of `work`, which is begun; cancel() ends it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin(self, work: Coroutine[Any, Any, T]) -> Callable[[], T]:
        """Starts `work`; the function returned waits for its result, and cancels it when the wait is interrupted."""
        future = self.start(work)

        def result() -> T:
            try:
                return future.result()
            except BaseException:
                future.cancel()
                raise

        return result

    def close(self) -> None:
        """Ends the engine and the thread."""
        # When the interpreter is ending, no thread can be started to wait for the engine process, which then leaves by
        # itself because its socket closes.
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(timeout=20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _shut_down(self) -> None:
        for close in self.closing:
            await close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


def _log_phases() -> Callable[[Progress], None]:
    last = ""

    def log(progress: Progress) -> None:
        nonlocal last
        if progress.phase != last:
            logger.info("starting: %s", progress.phase)
        last = progress.phase

    return log
