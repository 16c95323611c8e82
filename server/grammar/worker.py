"""The process that compiles grammars: `python -m vserve.server.grammar.worker --fd N`.

It loads libraries and vocabulary once, and forks for each grammar a child that may hang, crash or eat its memory: the
child is killed, and nobody else waits for it. Forking is safe in a process of one thread alone: it starts none, and
keeps torch out, which starts some on machines with GPUs, takes seconds to import, and is of no use here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import msgspec

from ...engine.grammar.grammar import Vocabulary, prepare
from ...engine.link.connection import Connection
from ...engine.link.messages import SetVocabulary
from .compile import CompileError, compile
from .constraint import Compile, Compiled, ToCompiler

MEMORY_LIMIT = 1 << 30  # bytes of address space beyond what the libraries take
NICENESS = 10  # the engine may share these cores
_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A compilation that runs."""

    job: Compile
    pid: int
    pipe: int  # what it writes its Compiled to
    started: float  # time.monotonic(), of the job
    skip: frozenset[str]
    received: bytearray = field(default_factory=bytearray)
    timer: asyncio.TimerHandle | None = None
    late: bool = False
    dropped: bool = False


class Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._vocabulary: Vocabulary | None = None
        self._children: dict[int, Child] = {}  # by pid
        self._connection: Connection

    async def run(self) -> None:
        """Until the API process is gone."""
        self._loop = asyncio.get_running_loop()
        gone: asyncio.Future[Exception | None] = self._loop.create_future()
        self._connection = await Connection.open(self._sock, ToCompiler, self._receive, gone.set_result)
        await gone
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _receive(self, message: ToCompiler) -> None:
        if isinstance(message, SetVocabulary):
            prepared = prepare(message)
            self._connection.send(prepared)  # leaves when this returns, before the first Compiled
            self._vocabulary = Vocabulary(prepared)
        elif isinstance(message, Compile):  # no more at once than children may run: the API process has the queue
            self._fork(message, time.monotonic(), frozenset())
        else:
            for child in self._children.values():
                if child.job.id == message.id:
                    child.dropped = True
                    os.kill(child.pid, signal.SIGKILL)  # the pipe closes, which is read below

    def _fork(self, job: Compile, started: float, skip: frozenset[str]) -> None:
        # xgrammar gets half the time: where it needs more, or crashes, llguidance may do.
        left = started + job.timeout * (1.0 if skip else 0.5) - time.monotonic()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_child(job, self._vocabulary, skip, writing, max(left, 0.1))
        os.close(writing)
        os.set_blocking(reading, False)
        child = self._children[pid] = Child(job, pid, reading, started, skip)
        child.timer = self._loop.call_later(left, self._give_up, child)
        self._loop.add_reader(reading, self._read, child)

    def _give_up(self, child: Child) -> None:
        child.late = True
        os.kill(child.pid, signal.SIGKILL)  # the pipe closes, which is read below

    def _read(self, child: Child) -> None:
        if chunk := os.read(child.pipe, 1 << 20):
            child.received += chunk
            return
        assert child.timer is not None
        child.timer.cancel()
        self._loop.remove_reader(child.pipe)
        os.close(child.pipe)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)  # it has said its last word
        os.waitpid(child.pid, 0)
        del self._children[child.pid]
        if child.dropped:
            return
        try:
            result = msgspec.msgpack.decode(child.received, type=Compiled)
        except msgspec.DecodeError:
            if not child.skip:
                self._fork(child.job, child.started, frozenset({"xgrammar"}))
                return
            what = f"took longer than {child.job.timeout:g} s to compile" if child.late else "crashed the compiler"
            result = Compiled(child.job.id, error=f"it {what}; simplify it.")
        seconds = time.monotonic() - child.started
        is_costly = bool(child.skip) and result.error is not None  # the first attempt was killed
        self._connection.send(msgspec.structs.replace(result, seconds=seconds, is_costly=is_costly))


def _be_child(job: Compile, vocabulary: Vocabulary | None, skip: frozenset[str], pipe: int, seconds: float) -> None:
    """Compiles, answers and ends: whatever happens here, the parent's loop must not go on in this process."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The worker's socket above all: while a copy is open, its other end cannot see the worker die.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 1024)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # the libraries print parts of what they read
            os.dup2(nothing, stream)
        with open("/proc/self/statm") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, size + MEMORY_LIMIT))
        limit = math.ceil(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            assert vocabulary is not None
            result = Compiled(job.id, *compile(job.constraint, vocabulary, skip))
        except CompileError as error:
            result = Compiled(job.id, error=str(error))
        with open(pipe, "wb") as file:
            file.write(msgspec.msgpack.encode(result))
    finally:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles grammars for a vserve process that holds the other end.")
    parser.add_argument("--fd", type=int, required=True, help="a connected Unix-domain socket")
    sock = socket.socket(fileno=parser.parse_args().fd)
    sock.setblocking(False)
    os.nice(NICENESS)
    sys.modules["torch"] = None  # type: ignore[assignment]  # for tvm_ffi, which imports it where it can
    asyncio.run(Worker(sock).run())


if __name__ == "__main__":
    main()
