"""Where ranks run: processes of this host, or of another that has dialled in. What an engine asks of either."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..link import logs
from ..options.config import EngineConfig, default_cpu_threads
from .messages import Seat


class RankHandle(Protocol):
    """Of one rank."""

    @property
    def where(self) -> str:
        """ "" on this host, else what follows the rank in a message: " on node 1 (10.0.0.2)"."""
        ...

    def wait(self, seconds: float | None = None) -> str | None:
        """How it has ended, as a message says it after the rank; None where it lives on after so many seconds."""
        ...

    def kill(self) -> None: ...

    def dump_stacks(self) -> None:
        """Has the rank write them to stderr."""
        ...

    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger, as far as can be told."""
        ...


@dataclass
class StartedRanks:
    """The ranks of an engine but its own, started, by rank. `sockets` lead to them."""

    seats: dict[int, Seat] = field(default_factory=dict)  # of all of them
    handles: dict[int, RankHandle] = field(default_factory=dict)  # that are watched
    sockets: dict[int, socket.socket] = field(default_factory=dict)


class Child:
    """A process of this host."""

    where = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, rank: int, threads: int) -> tuple[Child, socket.socket]:
        """→ (it, the engine's end of a socket pair to it). Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                return cls(spawn(rank, theirs, threads)), ours
            except OSError:
                ours.close()
                raise

    def wait(self, seconds: float | None = None) -> str | None:
        try:
            return end_of(self._process.wait(seconds))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()

    def dump_stacks(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False


def spawn(
    rank: int, sock: socket.socket, threads: int, environment: Mapping[str, str] = {}, before: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """A rank's process, which follows what comes by `sock`. It ends with the thread that calls this. `threads`: on the
    CPU, 0: as its options say, and libraries like; `before`: a command that runs it, and then is its parent. Raises
    OSError."""
    threading = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return subprocess.Popen(
        [*before, sys.executable, "-m", "vserve.engine.start.rank_process", "--fd", str(sock.fileno()),
         "--parent", str(0 if before else os.getpid()), "--rank", str(rank),
         "--cpu-threads", str(threads), *logs.arguments()],
        pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, **threading, **environment},
    )  # fmt: skip


def end_of(code: int) -> str:
    """What became of a process, by its exit code."""
    if code >= 0:
        return f"exited with code {code}; its last words are above"
    told = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"{told}; out of memory is the usual reason (dmesg tells)" if code == -signal.SIGKILL else told


def may_follow(how: str) -> bool:
    """Whether a rank ends like this where another was lost before it: its collectives break, and it leaves by itself,
    or NCCL has it abort."""
    return how.startswith("exited") or "(SIGABRT)" in how


def threads_of_rank(config: EngineConfig) -> int:
    """On this host, of whose threads each of its ranks has an even share."""
    return max(1, (config.cpu_threads or default_cpu_threads()) // config.ranks_per_node)
