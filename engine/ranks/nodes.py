"""The other nodes of an engine, as the first one sees them: they dial in, start ranks, tell what becomes of them."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from ..errors import ConfigError
from ..options.config import EngineConfig
from .handshake import Guest, Hello, difference, is_loopback, meet
from .messages import BEAT, SILENCE, Beat, Channel, DumpStacks, Ended, FromNode, Goodbye, Kill, Launch, Stopped

logger = logging.getLogger(__name__)

REMINDER = 30.0  # seconds between two lines that say who is waited for
STRANGERS = 64  # who may be about to say who they are, at the same time: then one of the address with most gives way
LAST_WORD = 1.0  # seconds in which it may turn out why a node has hung up


class Node:
    """One that was let in, and the ranks it runs. Threads of its own read and write: they must not wait for the event
    loop, which may wait for a device that waits for a rank."""

    def __init__(self, index: int, host: str, sock: socket.socket) -> None:
        self.index, self.host = index, host
        self.explain: Callable[[], str | None] = lambda: None  # why it is gone, where somebody knows better
        self._socket = sock
        self._channel = Channel(sock, FromNode)
        self._ends: dict[int, str] = {}  # of ranks
        self._stopped: set[int] = set()
        self._lost: str | None = None
        self._news = threading.Condition()

    @property
    def where(self) -> str:
        return f" on node {self.index} ({self.host})"

    @property
    def is_there(self) -> bool:
        """As far as is known: it has neither hung up nor been silent for long."""
        return self._lost is None

    def watch(self) -> None:
        self._socket.settimeout(SILENCE)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=f"vserve-node-{self.index}", daemon=True).start()

    def say(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it is gone, as _listen finds out
            self._channel.send(message)

    def wait(self, rank: int, seconds: float | None = None) -> str | None:
        with self._news:
            self._news.wait_for(lambda: rank in self._ends or self._lost is not None, seconds)
            return self._ends.get(rank, self._lost)

    def is_stopped(self, rank: int) -> bool:
        return rank in self._stopped

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                with self._news:
                    if isinstance(message, Ended):
                        self._ends[message.rank] = message.how
                        self._news.notify_all()
                    elif isinstance(message, Stopped):
                        (self._stopped.add if message.is_stopped else self._stopped.discard)(message.rank)
        except TimeoutError:
            cause = f"is lost: its host has been silent for {SILENCE:.0f} s"
        except (OSError, EOFError, ValueError):
            cause = self.explain() or "is lost: its node has hung up; that process or its host has ended"
        with self._news:
            self._lost = cause
            self._news.notify_all()

    def _beat(self) -> None:
        while self._lost is None:
            self.say(Beat())
            time.sleep(BEAT)


class RemoteRank:
    """See RankHandle."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank
        self.where = node.where

    def wait(self, seconds: float | None = None) -> str | None:
        return self._node.wait(self._rank, seconds)

    def kill(self) -> None:
        self._node.say(Kill())

    def dump_stacks(self) -> None:
        self._node.say(DumpStacks())

    def is_stopped(self) -> bool:
        return self._node.is_stopped(self._rank)


class Nodes:
    """Whoever makes one must close it."""

    def __init__(
        self, config: EngineConfig, address: str, port: int, secret: str, facts: Mapping[str, str],
        wanted: Mapping[int, tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Listens at once, on port 0 at a free one. `wanted`: nodes, and the ranks that each starts. Raises
        ConfigError."""
        self._config, self._secret, self._facts, self._wanted = config, secret, facts, wanted
        self.nodes: dict[int, Node] = {}
        self.sockets: dict[int, socket.socket] = {}  # to ranks
        self._closed = False
        self._strangers: dict[socket.socket, str] = {}  # from where, who have proved nothing; the longest first
        self._lock = threading.Lock()
        self._arrivals: queue.Queue[tuple[Guest, str]] = queue.Queue()
        self._listener = listen(address, port)
        self.address = (address, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="vserve-nodes", daemon=True).start()

    def gather(self, waiting: Callable[[list[int]], str | None] = lambda missing: None) -> None:
        """Returns when all ranks have been started. `waiting`: called now and then with the nodes that have not come;
        what it returns is why they never will. Raises ConfigError."""
        deadline = time.monotonic() + self._config.distributed_timeout_seconds
        begun = reminded = time.monotonic() - REMINDER + 2 * BEAT
        while missing := [index for index in self._wanted if not self._is_there(index)]:
            if self._closed:
                raise ConfigError("the start was given up")
            if (cause := waiting(missing)) is not None:
                raise ConfigError(cause)
            self._one(deadline, f"{_names(missing)} of {len(self._wanted) + 1} {_have(missing)} not come to "
                      f"{self.address[0]}:{self.address[1]}")  # fmt: skip
            if missing and time.monotonic() - reminded > REMINDER:
                reminded = time.monotonic()
                logger.info("waiting for %s at %s:%d: %s", _names(missing), *self.address,
                            "the same command, with --node-rank and --headless")  # fmt: skip
        logger.info("all nodes are there, after %.0f s", max(0.0, time.monotonic() - begun - REMINDER + 2 * BEAT))
        for index, ranks in self._wanted.items():
            self.nodes[index].say(Launch(ranks, self._config.cpu_threads or 0))
        for index, ranks in self._wanted.items():
            for rank in ranks:
                while rank not in self.sockets:
                    if (how := self.nodes[index].wait(rank, 0.0)) is not None:
                        raise ConfigError(f"rank {rank}{self.nodes[index].where} {how}")
                    self._one(deadline, f"rank {rank}{self.nodes[index].where} has not dialled in")

    def close(self, in_order: bool) -> None:
        """`in_order`: the other nodes end too; else they come again. Idempotent."""
        self.no_more()
        for node in self.nodes.values():
            node.say(Goodbye() if in_order else Kill())
            node.close()
        self.nodes.clear()
        while not self._arrivals.empty():
            self._arrivals.get()[0].sock.close()

    def no_more(self) -> None:
        """Nobody else is let in."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone wakes nobody who waits for the next one
        self._listener.close()

    def _is_there(self, index: int) -> bool:
        return index in self.nodes and self.nodes[index].is_there

    def _one(self, deadline: float, otherwise: str) -> None:
        """Takes in who has dialled in meanwhile, if anybody. Raises ConfigError after the deadline."""
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{otherwise} within {self._config.distributed_timeout_seconds} s (--distributed-timeout-seconds): "
                "start the same command there, with its --node-rank and --headless"
            )
        try:
            guest, host = self._arrivals.get(timeout=BEAT / 2)
        except queue.Empty:
            return
        hello, sock = guest.hello, guest.sock
        try:
            if (problem := self._problem(hello, host)) is not None:
                logger.warning("refused: %s", problem)
                guest.refuse(problem)
                sock.close()
                return
            guest.admit()
        except OSError:
            sock.close()
            return
        if hello.rank:
            self.sockets[hello.rank] = sock
        else:
            logger.info("node %d is there, from %s", hello.node, host)
            if (before := self.nodes.get(hello.node)) is not None:
                before.close()
            self.nodes[hello.node] = node = Node(hello.node, host, sock)
            node.watch()  # at once: it does not wait in silence for the others

    def _problem(self, hello: Hello, host: str) -> str | None:
        """Why it is not let in."""
        before = self.nodes.get(hello.node)
        if hello.rank:
            known = hello.rank in self._wanted.get(hello.node, ()) and hello.rank not in self.sockets
            return None if known and before is not None else f"rank {hello.rank} is not awaited: start its node again"
        if hello.node not in self._wanted:
            return f"node {hello.node} is none of the {len(self._wanted) + 1}: give {host} another --node-rank"
        if before is not None and before.is_there:
            return f"node {hello.node} is there already, from {before.host}: give {host} another --node-rank"
        return difference(self._facts, hello.facts, f"node {hello.node} ({host})")

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError:  # it was closed, or strangers have taken all descriptors
                time.sleep(BEAT / 10)
                continue
            with self._lock:
                self._strangers[sock] = address[0]
                if len(self._strangers) > STRANGERS:
                    self._give_way()
            threading.Thread(target=self._meet, args=(sock, address[0]), name="vserve-hello", daemon=True).start()

    def _give_way(self) -> None:
        """With the lock. Who has waited longest, of the address that most have come from: a flood of its own."""
        counts = Counter(self._strangers.values())
        host = max(counts, key=counts.__getitem__)
        longest = next(sock for sock, its_host in self._strangers.items() if its_host == host)
        del self._strangers[longest]
        with contextlib.suppress(OSError):
            longest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _meet(self, sock: socket.socket, host: str) -> None:
        """On a thread of its own: who says nothing keeps nobody waiting."""
        try:
            guest = meet(sock, self._secret)
            if not self._forget(sock):
                raise ConnectionError("it gave way to others")
        except Exception as error:  # whatever a stranger may say
            if self._forget(sock):  # else it gave way: of many such not a word
                logger.warning("%s has dialled in, and is not let in: %s", host, error or type(error).__name__)
            sock.close()
            return
        self._arrivals.put((guest, host))

    def _forget(self, sock: socket.socket) -> bool:
        """Whether it was a stranger until now: who is none, because it has proved that it knows the secret, gives way
        to nobody any more."""
        with self._lock:
            return self._strangers.pop(sock, None) is not None


def listen(address: str, port: int) -> socket.socket:
    """On loopback where `address` is there, else on all interfaces. Raises ConfigError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        host = str(where[0]) if is_loopback(address) else ""
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
        return sock
    except OSError as error:
        raise ConfigError(
            f"--master-addr {address}, --master-port {port}: nodes cannot dial in there "
            f"({error.strerror or error}): "
            "give another address or port, on all nodes"
        ) from None


def _names(indices: list[int]) -> str:
    return ("node " if len(indices) == 1 else "nodes ") + ", ".join(map(str, indices))


def _have(indices: list[int]) -> str:
    return "has" if len(indices) == 1 else "have"
