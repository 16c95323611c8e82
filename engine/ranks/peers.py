"""The other ranks of an engine, as rank 0 sees them: started, told what to do, watched, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from ..link import logs
from ..link.connection import Connection
from ..link.messages import Failure
from ..options.config import EngineConfig
from .adapters import OtherStores
from .hang import IDLE, INTERVAL, START_LIMIT, Effort, HangWatch, Starting, pulse
from .messages import AdapterRead, FromRank, Join, Leave, Pulse, Seat, ToRank
from .place import RankHandle, may_follow, threads_of_rank
from .placing import SeveralHosts, placing

logger = logging.getLogger(__name__)

BLAME = 2.0  # seconds: that a rank is dead, collectives of others may notice before its process has been seen to end
LAST_WORDS = 2.0  # seconds for the engine to leave by itself once a rank is lost
FAREWELL = 3.0  # seconds for the others to leave
SHOWING = 0.3  # for all of them to write their stacks

T = TypeVar("T")
Progress = Callable[[], tuple[bool, int]]  # whether there is something to do, how much has been done


class RankLost(RuntimeError):
    """A rank died, hangs or failed, as the message says in one line. The others wait for it, so none can go on."""


def share_of_threads(config: EngineConfig) -> EngineConfig:
    """As each rank of it gets it."""
    if config.ranks_per_node == 1:
        return config
    return dataclasses.replace(config, cpu_threads=threads_of_rank(config))


class Peers:
    """None, where the engine has one rank."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[NoReturn] = self._loop.create_future()
        self._placing = placing(config)
        self._handles: dict[int, RankHandle] = {}
        self._cards: dict[int, int] = {}
        self._connections: list[Connection] = []
        self._encoder = msgspec.msgpack.Encoder()
        self.stores = OtherStores(self.send, range(1, config.world_size))
        self._hangs = HangWatch(config.world_size, config.pipeline_parallel_size)
        self._watching: asyncio.Task[None] | None = None
        self._suspects: dict[int, str] = {}  # by rank: what has become of it, perhaps because of another
        self._ending = False
        self.seat = Seat()

    def __len__(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        """Returns when their processes were started. Raises OSError or ConfigError when they could not be."""
        try:
            placement = await self._placing.start()
        except BaseException:
            self._placing.close(in_order=False)
            raise
        self.seat, self._handles = placement.seats[0], placement.handles
        self._cards = {rank: seat.card for rank, seat in placement.seats.items()}
        # Secrets are rank 0's business; so is which node it is.
        options = dataclasses.asdict(dataclasses.replace(self._config, cluster_secret=None, prefix_cache_seed=None))
        for rank, sock in sorted(placement.sockets.items()):
            sock.setblocking(False)
            connection = await Connection.open(sock, FromRank, partial(self._receive, rank), lambda _: None)
            self._connections.append(connection)
            connection.send(Join(options, placement.seats[rank]))
        for rank in self._handles:
            threading.Thread(target=self._await_end, args=(rank,), name=f"vserve-rank-{rank}", daemon=True).start()
        if not self._handles:
            return
        self._watching = asyncio.create_task(self._watch(lambda: (True, 0), Starting(), lambda: START_LIMIT))

    @property
    def _ranks(self) -> list[int]:
        """But for rank 0, which has a place where that may be taken from it."""
        return [rank for rank in self._handles if rank]

    @property
    def lost(self) -> bool:
        return self._lost.done() and not self._lost.cancelled()

    @property
    def launched(self) -> SeveralHosts | None:
        """Where torchrun has started them: its processes, each of which answers its own caller."""
        by_torchrun = self._config.distributed_executor_backend == "external_launcher"
        return self._placing if by_torchrun and isinstance(self._placing, SeveralHosts) else None

    def send(self, message: ToRank) -> None:
        """To all of them, now: they should launch when rank 0 does."""
        encoded = self._encoder.encode(message)
        for connection in self._connections:
            connection.send_now(encoded)

    async def beside(self, work: Awaitable[T]) -> T:
        """What `work` of rank 0 returns or raises. Raises RankLost as soon as another rank is lost."""
        if not self._handles:
            return await work
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            failed = task.done() and not task.cancelled() and isinstance(task.exception(), RuntimeError)
            if failed and not self._lost.done():
                await asyncio.wait({self._lost}, timeout=BLAME)
                self._settle()
            if self._lost.done():
                self._lost.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=BLAME)

    def watch_steps(self, progress: Progress, effort: Effort, limit: Callable[[], float]) -> None:
        """For hangs, from now on, as in a step that takes `limit` seconds. `effort`: of rank 0."""
        if self._watching is not None:
            self._watching.cancel()
        self._hangs = HangWatch(self._config.world_size, self._config.pipeline_parallel_size)
        self._watching = asyncio.create_task(self._watch(progress, effort, limit))
        if not self._config.engine_in_process:  # then others have work for the loop
            arguments = (effort, limit)
            threading.Thread(target=self._watch_loop, args=arguments, name="vserve-turns", daemon=True).start()

    def close(self, patience: float = FAREWELL) -> None:
        """Has them leave, and kills those that have not in so many seconds. Idempotent; afterwards there are none."""
        if self._watching is not None:
            self._watching.cancel()
        self._ending = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.send(Leave())
        in_order = patience > 0 and not self.lost
        deadline = time.monotonic() + (patience if in_order else 0.0)
        for rank in self._ranks:
            self._handles[rank].wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        deadline = time.monotonic() + LAST_WORDS  # a card's driver may hold it
        for rank in self._ranks:
            self._handles[rank].wait(max(0.0, deadline - time.monotonic()))
        for connection in self._connections:
            connection.close()
        _leave_group()
        self._placing.close(in_order)
        if self.lost:
            self._lost.exception()  # said already
        self._lost.cancel()

    # ---- their life and death ----

    def _receive(self, rank: int, message: FromRank) -> None:
        if isinstance(message, Pulse):
            self._hangs.heard(rank, message)
        elif isinstance(message, AdapterRead):
            self.stores.heard(rank, message)
        elif isinstance(message, Failure):
            self._suspect(rank, f"{self._name(rank)}: {message.message}")

    def _await_end(self, rank: int) -> None:
        """On a thread of its own: also where the loop's thread waits for a device that waits for this rank."""
        how = self._handles[rank].wait()
        if self._ending or how is None:
            return
        cause, follows = f"{self._name(rank)} {how}", may_follow(how)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if follows:
                self._loop.call_soon_threadsafe(self._suspect, rank, cause)
            else:
                self._loop.call_soon_threadsafe(self.lose, cause)
        if self._config.engine_in_process:
            return
        time.sleep(BLAME + LAST_WORDS + BLAME * follows)
        if not self._ending and self._lost.done():
            time.sleep(LAST_WORDS)  # its loop has heard it: a machine that is slow gets the time to say so
        if not self._ending:
            self._exit(f"{cause}; rank 0 hangs with it, and is ended")

    def _suspect(self, rank: int, cause: str) -> None:
        """It failed, or left by itself: as all do once one is lost, and that news may take longer. The first of them
        is blamed where none comes in time."""
        if not self._suspects:
            self._loop.call_later(BLAME, self._settle)
        self._suspects.setdefault(rank, cause)

    def _settle(self) -> None:
        if self._suspects:
            self.lose(next(iter(self._suspects.values())))

    def lose(self, cause: str) -> None:
        """Ends all of them. The first cause is the one that counts."""
        if self._ending or self._lost.done():
            return
        self._lost.set_exception(RankLost(cause))
        self._kill()  # they wait for it, on a card for ever

    async def _watch(self, progress: Progress, effort: Effort, limit: Callable[[], float]) -> None:
        found = None
        while found is None:
            await asyncio.sleep(INTERVAL)
            found = self._hangs.tick(pulse(effort), *progress(), limit())
        await self._end_hanging(*found)

    def _watch_loop(self, effort: Effort, limit: Callable[[], float]) -> None:
        """On a thread of its own: the loop's launches on a card, where there may be no more room because another rank
        hangs. Then nobody else could say so."""
        turned, waited, before = threading.Event(), 0.0, effort()
        turned.set()
        while not self._ending and waited < limit():
            if turned.is_set():
                turned.clear()
                with contextlib.suppress(RuntimeError):  # it is closed
                    self._loop.call_soon_threadsafe(turned.set)
            time.sleep(INTERVAL)
            now = effort()
            waited = 0.0 if turned.is_set() or now - before > IDLE * INTERVAL else waited + INTERVAL
            before = now
        if not self._ending:
            self._show_stacks()
            time.sleep(SHOWING)
            self._exit(f"{self._name(0)} has launched nothing for {waited:.0f} s, because of itself or of another rank")

    def _exit(self, cause: str) -> NoReturn:
        logger.error("%s", cause)
        self._kill()
        logs.flush()
        os._exit(1)

    async def _end_hanging(self, rank: int, what: str) -> None:
        name, handle = self._name(rank), self._handles.get(rank)
        if handle is not None and handle.is_stopped():
            what = f"is stopped (SIGSTOP, a debugger), and {what}"
        logger.error("%s %s; the stacks of all ranks follow", name, what)
        self._show_stacks()
        await asyncio.sleep(SHOWING)
        ended = "all ranks are ended" if rank == 0 else "it was killed by signal 9 (SIGKILL)"
        self.lose(f"{name} {what} while the others wait for it: {ended}")

    def _show_stacks(self) -> None:
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        for other in self._handles.values():
            other.dump_stacks()

    def _kill(self) -> None:
        for handle in self._handles.values():
            handle.kill()

    def _name(self, rank: int) -> str:
        on_card = self._config.device == "cuda" or (self._config.device == "auto" and Path("/dev/nvidiactl").exists())
        where = self._handles[rank].where if rank in self._handles else ""
        card = f"cuda:{self._cards.get(rank, rank)}" if on_card else "cpu"
        return f"rank {rank} of {self._config.world_size} ({card}){where}"


def _leave_group() -> None:
    """So that another engine may start in this process. What runs on cards ends with its process."""
    dist = sys.modules.get("torch.distributed")
    if getattr(dist, "is_initialized", bool)() and dist is not None and dist.get_backend() == "gloo":
        dist.destroy_process_group()
