"""The ranks that share one model, as its layers see them: a sum over all, a gathering, a broadcast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from ...kernels.norm import add_rms_norm
from .rendezvous import Rendezvous

TIMEOUT = timedelta(minutes=10)  # of a collective that waits for a rank; whoever watches the processes is faster
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its new name since torch 2.13
LOCAL = ("file://", "tcp://127.0.0.1", "tcp://localhost")  # rendezvous of ranks on one host


class Group(Protocol):
    """Every rank calls the same collectives in the same order, with tensors of the same shapes and dtypes.

    On a card they are kernels of the current stream, may be captured in CUDA graphs, and wait for no host.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def prepare(self, row_bytes: int) -> None:
        """Make ready for sums of rows of so many bytes (a token's hidden state), before graphs are captured."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, the same bits on every rank; x may be overwritten."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """kernels.norm.add_rms_norm of the sum of the ranks' x."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' x one after the other along `dim`, in the order of ranks."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank `source`, written over x."""
        ...


@dataclass(frozen=True)
class SingleGroup:
    """A rank that has nobody to talk to. With a size above 1: one that is only looked at (what does it hold, which
    kernels does it launch?), and takes the others for its likes where their shapes count."""

    rank: int = 0
    size: int = 1

    def prepare(self, row_bytes: int) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps, scale)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x if self.size == 1 else torch.cat([x] * self.size, dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x


ALONE = SingleGroup()


class ProcessGroup:
    """Ranks in processes of their own: torch.distributed over NCCL between cards, over gloo on the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def prepare(self, row_bytes: int) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(x), residual, weight, eps, scale)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        x = x.contiguous()
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _gather(parts, x, group=self.group)
        dim %= x.dim()
        if dim == 0:
            return parts
        return parts.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, group=self.group, group_src=source)
        return x

    def close(self) -> None:
        """Leave; the others must do the same, or wait in vain for this rank."""
        dist.destroy_process_group(self.group)


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
    from .symmetric import SymmetricGroup, reach_each_other  # it imports this file

    if device.type == "cuda" and cards is not None and reach_each_other(cards) and symmetric:
        return SymmetricGroup(group, device)
    return ProcessGroup(group)
