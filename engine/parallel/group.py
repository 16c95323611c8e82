"""The ranks that share one model, as its layers see them: a sum over all, a gathering, a broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from ...kernels.norm.norm import add_rms_norm

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


def gather(group: Group, device: torch.device, numbers: Sequence[int]) -> list[list[int]]:
    """What each rank has given, in the order of ranks. Every rank has to call it, with as many numbers."""
    if group.size == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    return [part.tolist() for part in group.all_gather(mine, 0).chunk(group.size)]
