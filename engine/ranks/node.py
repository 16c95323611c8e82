"""A node without an API: dials in to the first one, runs the ranks that it is told to, and watches them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

from ..errors import ConfigError
from ..options.config import EngineConfig
from .handshake import Hello, Stranger, check_secret, dial, facts, use_interface
from .messages import BEAT, Beat, Channel, DumpStacks, Ended, Goodbye, Kill, Launch, Said, Stopped, ToNode
from .place import Child, end_of, spawn, threads_of_rank

logger = logging.getLogger(__name__)

RETRY = 1.0  # seconds between two attempts
REMINDER = 30.0  # seconds between two lines that say who is waited for
LEAVING = 3.0  # seconds for ranks to leave
LOADING = 60.0  # seconds of silence of node 0, whose process may hold all its threads up while it imports and loads


@dataclasses.dataclass
class Node:
    """Serves one engine after the other: when one has died, the next one is waited for."""

    index: int
    address: tuple[str, int]  # of node 0
    secret: str
    facts: Mapping[str, str]
    patience: float  # seconds to wait for node 0
    host_ip: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of ranks, beside this process's
    before: tuple[str, ...] = ()  # a command that runs them
    threads: int = 0  # of each rank on the CPU; 0: as node 0 says
    hear: Callable[[bytes], None] = lambda word: None  # what Said brings, on the thread of `serve`

    def __post_init__(self) -> None:
        self._socket: socket.socket | None = None
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()  # the engine, or its start
        self._leaving = False

    def serve(self) -> bool:
        """One engine, from dialling in to its end; the ranks have ended too. → whether it has ended in order. Raises
        ConfigError where node 0 does not answer, or refuses this one."""
        sock = self._socket = self._dial()
        self._over, self._leaving = threading.Event(), False
        channel = Channel(sock, ToNode)
        sock.settimeout(LOADING)
        threading.Thread(target=self._beat, args=(channel, self._over), name="vserve-beat", daemon=True).start()
        try:
            while True:
                message = channel.receive()
                if isinstance(message, Said):
                    self.hear(message.word)
                elif isinstance(message, Launch):
                    self._launch(message, channel, sock.getsockname()[0])
                elif isinstance(message, DumpStacks):
                    for process in self._ranks.values():
                        process.send_signal(signal.SIGUSR1)
                elif isinstance(message, Kill):
                    self.kill()
                elif isinstance(message, Goodbye):
                    self._leaving = True
                    self._await_ranks()
                    return True
        except TimeoutError:
            logger.error("node 0 has been silent for %.0f s: the ranks here are ended", LOADING)
            return False
        except (OSError, EOFError) as error:
            logger.warning("node 0 is gone: %s", error or type(error).__name__)
            return False
        finally:
            self._leaving = True
            self._over.set()
            self.kill()
            sock.close()

    def leave(self) -> None:
        """Ends `serve`, and the ranks, whatever node 0 does."""
        self._leaving = True
        self.kill()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """The ranks."""
        for process in list(self._ranks.values()):
            process.kill()

    def _dial(self) -> socket.socket:
        begun = time.monotonic()
        reminded = -REMINDER
        hello = Hello(b"", b"", self.index, facts=dict(self.facts))
        while True:
            try:
                return dial(self.address, self.secret, hello, self.host_ip)
            except Stranger as error:
                raise ConfigError(
                    f"what answers at {_at(self.address)} is not this engine's node 0 ({error}): check --master-port, "
                    "and that VSERVE_CLUSTER_SECRET is the same on all nodes"
                ) from None
            except OSError as error:
                cause = error
            waited = time.monotonic() - begun
            if waited > self.patience:
                raise ConfigError(
                    f"node 0 has not answered at {_at(self.address)} within {self.patience:g} s "
                    f"(--distributed-timeout-seconds; {cause}): is it started, are --master-addr and --master-port its "
                    "own, and is the port open?"
                )
            if waited - reminded >= REMINDER:
                reminded = waited
                logger.info("node %d waits for node 0 at %s (%s)", self.index, _at(self.address), cause)
            time.sleep(RETRY)

    def _launch(self, message: Launch, channel: Channel, mine: str) -> None:
        environment = {**os.environ, **self.environment}
        use_interface(environment, self.host_ip or mine)
        self._ranks = {}
        for rank in message.ranks:
            sock = dial(self.address, self.secret, Hello(b"", b"", self.index, rank), self.host_ip)
            with sock:
                process = spawn(rank, sock, self.threads or message.threads, environment, self.before)
            self._ranks[rank] = process
            watch = (rank, process, channel, self._over)
            threading.Thread(target=self._await, args=watch, name=f"vserve-rank-{rank}", daemon=True).start()
        logger.info("rank %s started for node 0 at %s", ", ".join(map(str, message.ranks)), _at(self.address))

    def _await(self, rank: int, process: subprocess.Popen[bytes], channel: Channel, over: threading.Event) -> None:
        how = end_of(code := process.wait())
        if not self._leaving and not over.is_set():
            if code:
                logger.error("rank %d %s", rank, how)
            with contextlib.suppress(OSError):
                channel.send(Ended(rank, how))

    def _beat(self, channel: Channel, over: threading.Event) -> None:
        stopped: dict[int, bool] = {}
        with contextlib.suppress(OSError):  # it is gone, as serve() finds out
            while not over.wait(BEAT):
                channel.send(Beat())
                for rank, process in list(self._ranks.items()):
                    if (now := Child(process).is_stopped()) != stopped.get(rank, False):
                        stopped[rank] = now
                        channel.send(Stopped(rank, now))

    def _await_ranks(self) -> None:
        deadline = time.monotonic() + LEAVING
        for process in self._ranks.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def run(config: EngineConfig, patience: float) -> int:
    """`--headless`: until node 0 ends in order, or has not answered for --distributed-timeout-seconds. Returns the exit
    code. `patience`: seconds that node 0 gets to finish after SIGTERM to this process."""
    check_secret(config)
    node = Node(
        config.node_rank, (config.master_addr, config.master_port), config.cluster_secret or "", facts(config),
        config.distributed_timeout_seconds, config.host_ip, threads=threads_of_rank(config),
    )  # fmt: skip
    asked: list[int] = []

    def end(number: int, _: object) -> None:
        """Requests are node 0's, which is told to end by the same hand: it gets its time to finish them."""
        asked.append(number)
        if len(asked) > 1 or not node._ranks:
            leave(number)
        logger.info("%s: node 0 gets %g s to finish", signal.Signals(number).name, patience)
        timer = threading.Timer(patience, leave, (number,))
        timer.daemon = True
        timer.start()

    def leave(number: int) -> None:
        node.kill()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while True:
        try:
            if node.serve():
                logger.info("node 0 has ended in order")
                return 0
        except ConfigError as error:
            print(f"vserve: {error}", file=sys.stderr)
            return 1
        if asked:
            return 128 + asked[0]
        node._ranks = {}
        logger.warning("the engine has ended; this node dials in again")
        time.sleep(RETRY)


def _at(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
