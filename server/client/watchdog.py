"""Judges the engine by what it says: news of steps while there is work, a heartbeat at any time."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys

from .client import Client
from .engine_client import EngineClient

logger = logging.getLogger(__name__)

SUSPENDED = 8.0  # seconds that an engine may be stopped for by a signal


class Watchdogs:
    """One for each engine, as they come and go."""

    def __init__(self, client: Client, *, stall_timeout: float, hang_timeout: float) -> None:
        """As Watchdog has them."""
        self._client = client
        self._limits = {"stall_timeout": stall_timeout, "hang_timeout": hang_timeout}
        self._each: dict[EngineClient, Watchdog] = {}

    async def run(self) -> None:
        while True:
            engines = self._client.engines
            self._each = {engine: self._each.get(engine) or Watchdog(engine, **self._limits) for engine in engines}
            await asyncio.sleep(interval(self._limits["stall_timeout"]))
            for watchdog in self._each.values():
                await watchdog.tick()


def interval(stall_timeout: float) -> float:
    """Seconds between two looks."""
    return min(0.5, stall_timeout / 4)


class Watchdog:
    """It counts its own ticks, not the clock: while this process was stopped or busy, the engine was not silent. So a
    server that is suspended as a whole and goes on has lost nothing."""

    def __init__(self, client: EngineClient, *, stall_timeout: float, hang_timeout: float) -> None:
        """Seconds without a sign of life until the engine counts as stalled, and until it is killed (0: never)."""
        self._client = client
        self._stall_timeout = stall_timeout
        self._hang_timeout = hang_timeout
        self.interval = interval(stall_timeout)
        self._seen: tuple[object, int, int] = (None, 0, 0)
        self._silent = 0.0  # without a heartbeat
        self._stuck = 0.0  # with work, and without a step
        self._suspended = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            await self.tick()

    async def tick(self) -> None:
        client = self._client
        stats, heartbeats, epoch = self._seen
        self._seen = (client.stats, client.num_heartbeats, client.epoch)
        stepped = client.stats is not stats or client.epoch != epoch
        beats = stepped or client.num_heartbeats != heartbeats or client.config.engine_in_process
        self._silent = 0.0 if beats or not client.ready else self._silent + self.interval
        self._stuck = 0.0 if stepped or not client.num_open or not client.ready else self._stuck + self.interval
        seconds = max(self._silent, self._stuck)
        self._suspended = self._suspended + self.interval if client.is_suspended() else 0.0
        if self._hang_timeout and self._suspended >= SUSPENDED:
            self._suspended = 0.0
            client.give_up_on_engine(f"the engine process was stopped by a signal (SIGSTOP) for {SUSPENDED:.0f} s")
            return
        if not client.ready:
            return
        if seconds < self._stall_timeout:
            if client.stalled is not None:
                logger.warning("the engine goes on after a stall of %.0f s", client.stalled)
            client.stalled = None
            return
        if client.stalled is None:
            client.num_stalls += 1
            logger.error("%s; the stacks of all processes follow", self._finding(seconds))
            await self._dump_stacks()
        client.stalled = seconds
        if self._hang_timeout and seconds >= self._hang_timeout:
            finding = self._finding(seconds)
            logger.error("%s and is killed; the stacks of all processes follow", finding)
            await self._dump_stacks()
            client.give_up_on_engine(finding)

    def _finding(self, seconds: float) -> str:
        if self._silent >= self._stuck:
            return f"the engine has been silent for {seconds:.0f} s"
        return f"the engine has run no step for {seconds:.0f} s though {self._client.num_open} requests wait"

    async def _dump_stacks(self) -> None:
        if not self._client.dump_stacks() and not self._client.config.engine_in_process:
            logger.error("the engine process is stopped (SIGSTOP, a debugger): it cannot show its stacks")
        await asyncio.sleep(0.2)  # one process after the other
        try:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        except (OSError, ValueError, AttributeError, RuntimeError):
            logger.debug("no stderr to write the stacks to")
