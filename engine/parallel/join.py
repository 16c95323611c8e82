"""How the ranks that share a model find each other, and what they talk through then."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed as dist

from .group import ALONE, LOCAL, TIMEOUT, Group, ProcessGroup
from .rendezvous import Rendezvous
from .symmetric import SymmetricGroup, reach_each_other


def join(
    rank: int, size: int, init_method: str, device: torch.device, symmetric: bool = True, num_stages: int = 1,
    timeout: timedelta = TIMEOUT, rendezvous: Rendezvous | None = None,
) -> Group:  # fmt: skip
    """The group of `size` ranks, once all have come, whenever that is. Called once in a process. Where they meet by a
    file, they are of one host, and rank n has its card n.

    init_method: where they meet, as torch.distributed has it ("file:///…" of a file that is not there yet, "tcp://…").
    symmetric: sums go through memory that all cards reach, where they do; or NCCL makes them all.
    num_stages: with several, no sums are made over all.
    timeout: of collectives. rendezvous: that at init_method, where the caller has it.
    """
    if size == 1:
        return ALONE
    if init_method.startswith(LOCAL):  # or libraries may choose an interface that leads nowhere
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    if rendezvous is None:
        rendezvous = Rendezvous(rank, size, init_method, timeout)
    rendezvous.wait_for_all("group")
    on_card = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_card else "gloo", store=dist.PrefixStore("torch", rendezvous.store), rank=rank, world_size=size,
        timeout=timeout, device_id=device if on_card else None,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    if num_stages > 1:
        return ProcessGroup(dist.group.WORLD)
    return wrapped(dist.group.WORLD, device, symmetric, range(size) if init_method.startswith(LOCAL) else None)


def wrapped(group: dist.ProcessGroup, device: torch.device, symmetric: bool, cards: range | None) -> ProcessGroup:
    """`cards`: of its ranks where they are of one host."""
    if device.type == "cuda" and cards is not None and reach_each_other(cards) and symmetric:
        return SymmetricGroup(group, device)
    return ProcessGroup(group)
