"""More engines, or fewer, while the others serve."""

from __future__ import annotations

import asyncio
import logging
import time

from ...engine.errors import ConfigError
from .mailbox import EngineDeadError
from .replicas import Replicas

logger = logging.getLogger(__name__)

LOOK_UP = 0.05  # seconds between two looks at engines that are drained


class ScalingError(Exception):
    """The fleet is as it was; the message is the cause, in one line."""


async def scale(replicas: Replicas, size: int, drain_timeout: float) -> None:
    """Returns when there are `size` engines that serve. Those beyond it get nothing new and finish what they have; what
    is open after `drain_timeout` seconds goes on elsewhere where it has no token yet, or ends with an error.

    Raises ScalingError, also where another change is under way.
    """
    if replicas.scaling.locked():
        raise ScalingError("engines are being added or removed already: wait until that is over")
    async with replicas.scaling:
        before = len(replicas.engines)
        if size > before:
            await _grow(replicas, size - before)
        elif size < before:
            await _shrink(replicas, size, drain_timeout)
        if size != before:
            logger.warning("%d engines serve from now on, instead of %d", size, before)


async def _grow(replicas: Replicas, count: int) -> None:
    try:
        added = replicas.add(count)
    except ConfigError as error:
        raise ScalingError(str(error)) from None
    replicas.leaving.update(added)  # until all of them are known to serve
    try:
        async with asyncio.TaskGroup() as starting:
            for engine in added:
                starting.create_task(engine.start())
        replicas.check_devices()
    except BaseException as error:
        for _ in added:
            replicas.remove_last()
        await asyncio.gather(*(engine.close() for engine in added), return_exceptions=True)
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(cause, Exception):
            raise
        if not isinstance(cause, EngineDeadError):
            logger.error("the engines that were to be added did not start", exc_info=cause)
        raise ScalingError(str(cause) or type(cause).__name__) from None
    replicas.leaving.difference_update(added)


async def _shrink(replicas: Replicas, size: int, drain_timeout: float) -> None:
    leaving = replicas.engines[size:]
    replicas.leaving.update(leaving)
    if not any(engine not in replicas.leaving for engine in replicas.serving):
        replicas.leaving.difference_update(leaving)
        raise ScalingError("none of the engines that would stay serves now: wait until one does")
    deadline = time.monotonic() + drain_timeout
    while any(engine.num_open and engine.ready for engine in leaving) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_UP)
    for index in reversed(range(size, size + len(leaving))):
        replicas.hand_over(index)
        engine = replicas.engines[index]
        if engine.num_open:
            logger.warning("engine %d: %d requests are cut off: it is removed", index, engine.num_open)
            engine.fail_all(EngineDeadError(f"engine {index} was removed, and its time to finish was over"))
        replicas.remove_last()
    await asyncio.gather(*(engine.close() for engine in leaving))
