"""What node 0 and the process that stands for another node (node.py) say to each other once that was let in."""

from __future__ import annotations

import msgspec

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


# ---- node → node 0 ----
class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A rank that nobody had asked to."""

    rank: int
    how: str  # see place.end_of


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """A rank has been stopped (SIGSTOP), or goes on."""

    rank: int
    is_stopped: bool


ToNode = Beat | Launch | Kill | DumpStacks | Goodbye
FromNode = Beat | Ended | Stopped
