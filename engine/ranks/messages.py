"""What the engine's process (rank 0) and those of its other ranks say to each other: msgpack over a Unix socket.

Every rank gets the same plan, and is told of what rank 0's mask does to it, so every rank launches the same collectives
in the same order. Tokens do not come this way: rank 0 samples, and its group broadcasts them from device to device.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..link.messages import Failure
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
    effort: float = 0.0  # seconds of its own work: see effort.py
    common: int = 0  # of what every rank does as often, stages too: collectives of all ranks, and halves of steps


class AdapterRead(msgspec.Struct, frozen=True, array_like=True, tag="adapter_read"):
    id: int
    error: str | None = None
    version: str = ""  # what it has read: see Adapter.version


ToRank = Join | Execute | Follow | Settle | ReadAdapter | ForgetAdapters | Leave
FromRank = Pulse | AdapterRead | Failure
