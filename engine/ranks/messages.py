"""Messages between rank 0 (the engine's process), the other ranks, and processes that stand for other nodes (node.py).

They are msgpack over sockets. Every rank gets the same plan, and what rank 0's mask does to it, so every rank launches
the same collectives in the same order. Tokens do not come this way: rank 0 samples, and its group broadcasts them from
device to device."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections import deque
from typing import Any

import msgspec

from ..link.connection import LENGTH
from ..link.messages import AddRequest, Failure, FromEngine
from ..link.plan import StepPlan


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """Which of how many ranks, and where they meet (as torch.distributed has it)."""

    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    card: int = 0  # of those that its process sees
    listener: int = -1  # of rank 0: the descriptor of the socket that listens there, where they meet by one


# ---- engine → rank ----
class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """The first message: the options of EngineConfig."""

    options: dict[str, Any]
    seat: Seat


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="execute"):
    plan: StepPlan


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """Take the tokens that rank 0 samples in the step executed last."""

    postponed: tuple[int, ...] = ()  # these are TokenMask's
    cuts: tuple[tuple[int, int], ...] = ()
    masked: bool = False  # whether it limits any sample


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """Every step that was sent is over: stages take the tokens that they have not needed yet. What is sent and not
    received for long keeps a card busy, and counts as a hang where NCCL watches."""


class ReadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="read_adapter"):
    """Into this rank's store, for steps to come; answered by AdapterRead."""

    id: int  # of its load
    path: str  # of its folder
    version: str = ""  # that it had when it was loaded; "": it is loaded now


class ForgetAdapters(msgspec.Struct, frozen=True, array_like=True, tag="forget_adapters"):
    """No step to come copies them to a slot, unless they are read anew."""

    ids: list[int]


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    pass


# ---- rank → engine ----
class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """Once a second: how far it has come. What does not change while a step is in flight tells who hangs."""

    collectives: int = 0  # entered, but for those of CUDA graphs
    effort: float = 0.0  # seconds of its own work: see hang.py
    common: int = 0  # of what every rank does as often, stages too: collectives of all ranks, and halves of steps


class AdapterRead(msgspec.Struct, frozen=True, array_like=True, tag="adapter_read"):
    id: int
    error: str | None = None
    version: str = ""  # what it has read: see Adapter.version


ToRank = Join | Execute | Follow | Settle | ReadAdapter | ForgetAdapters | Leave
FromRank = Pulse | AdapterRead | Failure


BEAT = 1.0  # seconds between two
SILENCE = 6.0  # seconds without one, after which the other host counts as lost


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Of either end: it is there."""


# ---- node 0 → node ----
class Launch(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """Start these ranks, each of which dials in."""

    ranks: tuple[int, ...]
    threads: int = 0  # for nodes that have no options of their own; see spawn in place.py


class Kill(msgspec.Struct, frozen=True, array_like=True, tag="kill"):
    """All ranks that were launched."""


class DumpStacks(msgspec.Struct, frozen=True, array_like=True, tag="dump"):
    pass


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The engine has ended in order; the ranks leave by themselves, and the node need not come again."""


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """What the engine says to the process that has started it, a Word, encoded: for processes that torchrun has
    started, each of which answers its own caller."""

    word: bytes


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Of that process: what is a request of every process must be the same in all of them."""

    id: int
    digest: str

    @classmethod
    def of(cls, request: AddRequest) -> Asked:
        said = msgspec.msgpack.encode(
            (request.prompt, request.sampling, request.priority, request.cache_salt, request.n)
        )
        return cls(request.id, hashlib.sha256(said).hexdigest())


Word = FromEngine | Asked


# ---- node → node 0 ----
class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A rank that nobody had asked to."""

    rank: int
    how: str  # see end_of in place.py


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """A rank has been stopped (SIGSTOP), or goes on."""

    rank: int
    is_stopped: bool


ToNode = Beat | Launch | Kill | DumpStacks | Goodbye | Said
FromNode = Beat | Ended | Stopped


class Channel:
    """The other end is a Connection."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._file = sock.makefile("rb")
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(list[incoming])
        self._received: deque[Any] = deque()
        self._writing = threading.Lock()

    def receive(self) -> Any:
        """Waits for the next message, without the interpreter's lock. Raises EOFError when there will be none."""
        while not self._received:
            (size,) = LENGTH.unpack(self._read(LENGTH.size))
            self._received.extend(self._decoder.decode(self._read(size)))
        return self._received.popleft()

    def send(self, message: Any) -> None:
        """Raises OSError when nobody is there to read it."""
        frame = msgspec.msgpack.encode([message])
        with self._writing:
            self._socket.sendall(LENGTH.pack(len(frame)) + frame)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data
