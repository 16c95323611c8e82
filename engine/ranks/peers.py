"""The other ranks of an engine, as rank 0 sees them: started, told what to do, watched, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from .. import logs
from ..config import EngineConfig, default_cpu_threads
from ..connection import Connection
from ..messages import Failure
from .effort import Effort, Starting
from .hang import IDLE, INTERVAL, START_LIMIT, HangWatch, pulse
from .messages import FromRank, Join, Leave, Pulse, Seat, ToRank

logger = logging.getLogger(__name__)

BLAME = 1.0  # seconds: that a rank is dead, collectives of others may notice before its process has been seen to end
LAST_WORDS = 2.0  # seconds for the engine to leave by itself once a rank is lost
FAREWELL = 3.0  # seconds for the others to leave
SHOWING = 0.3  # for all of them to write their stacks

T = TypeVar("T")
Progress = Callable[[], tuple[bool, int]]  # whether there is something to do, how much has been done


class RankLost(RuntimeError):
    """A rank died, hangs or failed, as the message says in one line. The others wait for it, so none can go on."""


def share_of_threads(config: EngineConfig) -> EngineConfig:
    """As each rank of it gets it."""
    if config.world_size == 1:
        return config
    threads = config.cpu_threads or default_cpu_threads()
    return dataclasses.replace(config, cpu_threads=max(1, threads // config.world_size))


class Peers:
    """None, where the engine has one rank."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[NoReturn] = self._loop.create_future()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: list[Connection] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._folder = ""  # where the ranks meet
        self._hangs = HangWatch(config.world_size, config.pipeline_parallel_size)
        self._watching: asyncio.Task[None] | None = None
        self._ending = False
        self.seat = Seat()

    def __len__(self) -> int:
        return len(self._processes)

    async def start(self) -> None:
        """Returns when their processes were started. Raises OSError when they could not be."""
        size = self._config.world_size
        if size == 1:
            return
        self._folder = tempfile.mkdtemp(prefix="vserve-ranks-")
        meeting = f"file://{self._folder}/store"
        self.seat = Seat(0, size, meeting)
        options = dataclasses.asdict(self._config)
        environment = os.environ | {"OMP_NUM_THREADS": str(self._config.cpu_threads)}
        for rank in range(1, size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                try:
                    self._processes[rank] = subprocess.Popen(
                        [sys.executable, "-m", "vserve.engine.ranks.process", "--fd", str(theirs.fileno()),
                         "--parent", str(os.getpid()), "--rank", str(rank), *logs.arguments()],
                        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                        env=environment if self._config.device == "cpu" else None,
                    )  # fmt: skip
                except OSError:
                    ours.close()
                    raise
            ours.setblocking(False)
            connection = await Connection.open(ours, FromRank, partial(self._receive, rank), lambda _: None)
            self._connections.append(connection)
            connection.send(Join(options, Seat(rank, size, meeting)))
            threading.Thread(target=self._await_end, args=(rank,), name=f"vserve-rank-{rank}", daemon=True).start()
        self._watching = asyncio.create_task(self._watch(lambda: (True, 0), Starting(), lambda: START_LIMIT))

    @property
    def lost(self) -> bool:
        return self._lost.done() and not self._lost.cancelled()

    def send(self, message: ToRank) -> None:
        """To all of them, now: they should launch when rank 0 does."""
        encoded = self._encoder.encode(message)
        for connection in self._connections:
            connection.send_now(encoded)

    async def beside(self, work: Awaitable[T]) -> T:
        """What `work` of rank 0 returns or raises. Raises RankLost as soon as another rank is lost."""
        if not self._processes:
            return await work
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            failed = task.done() and not task.cancelled() and isinstance(task.exception(), RuntimeError)
            if failed and not self._lost.done():
                await asyncio.wait({self._lost}, timeout=BLAME)
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
        deadline = time.monotonic() + (0.0 if self.lost else patience)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # a card's driver may hold it
                process.wait(LAST_WORDS)
        for connection in self._connections:
            connection.close()
        _leave_group()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self.lost:
            self._lost.exception()  # said already
        self._lost.cancel()

    # ---- their life and death ----

    def _receive(self, rank: int, message: FromRank) -> None:
        if isinstance(message, Pulse):
            self._hangs.heard(rank, message)
        elif isinstance(message, Failure):
            self.lose(f"{self._name(rank)}: {message.message}")

    def _await_end(self, rank: int) -> None:
        """On a thread of its own: also where the loop's thread waits for a device that waits for this rank."""
        code = self._processes[rank].wait()
        if self._ending:
            return
        cause = f"{self._name(rank)} {_end(code)}"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.lose, cause)
        if self._config.engine_in_process:
            return
        time.sleep(BLAME + LAST_WORDS)
        if not self._ending:
            self._exit(f"{cause}; rank 0 hangs with it, and is ended")

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
        name, process = self._name(rank), self._processes.get(rank)
        if process is not None and _is_stopped(process.pid):
            what = f"is stopped (SIGSTOP, a debugger), and {what}"
        logger.error("%s %s; the stacks of all ranks follow", name, what)
        self._show_stacks()
        await asyncio.sleep(SHOWING)
        ended = "all ranks are ended" if rank == 0 else "it was killed by signal 9 (SIGKILL)"
        self.lose(f"{name} {what} while the others wait for it: {ended}")

    def _show_stacks(self) -> None:
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        for other in self._processes.values():
            other.send_signal(signal.SIGUSR1)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _name(self, rank: int) -> str:
        on_card = self._config.device == "cuda" or (self._config.device == "auto" and Path("/dev/nvidiactl").exists())
        return f"rank {rank} of {self._config.world_size} ({f'cuda:{rank}' if on_card else 'cpu'})"


def _leave_group() -> None:
    """So that another engine may start in this process. What runs on cards ends with its process."""
    dist = sys.modules.get("torch.distributed")
    if getattr(dist, "is_initialized", bool)() and dist is not None and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _end(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}; its last words are above"
    told = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"{told}; out of memory is the usual reason (dmesg tells)" if code == -signal.SIGKILL else told


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
