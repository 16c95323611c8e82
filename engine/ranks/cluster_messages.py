"""What node 0 and the process that stands for another node (node.py) say to each other once that was let in."""

from __future__ import annotations

import hashlib

import msgspec

from ..link.messages import AddRequest, FromEngine

BEAT = 1.0  # seconds between two
SILENCE = 6.0  # seconds without one, after which the other host counts as lost


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Of either end: it is there."""


# ---- node 0 → node ----
class Launch(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """Start these ranks, each of which dials in."""

    ranks: tuple[int, ...]
    threads: int = 0  # for nodes that have no options of their own; see place.spawn


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
    how: str  # see place.end_of


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """A rank has been stopped (SIGSTOP), or goes on."""

    rank: int
    is_stopped: bool


ToNode = Beat | Launch | Kill | DumpStacks | Goodbye | Said
FromNode = Beat | Ended | Stopped
