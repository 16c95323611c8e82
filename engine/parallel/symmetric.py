"""Ranks whose cards reach each other's memory: sums are made there, in one kernel with the norm behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ...kernels.norm.all_reduce import Exchange, all_reduce, all_reduce_add_rms_norm
from .group import ProcessGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Ranks → bytes up to which every rank gets the rows of all. Of two ranks that is what has to be sent anyway: over
# NVLink it takes about half of NCCL's time or less, with the norm, at every size up to here. Of more, NCCL sends each
# byte only once or twice.
MOST_BYTES = {2: 72 << 20, 4: 384 << 10, 8: 128 << 10}
MOST_ROWS = 8448  # tokens of most steps


def reach_each_other(cards: range) -> bool:
    """Whether each of these cards reaches the memory of the others; warns where not, and nobody wants it so."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    if cards and max(cards) >= torch.cuda.device_count():  # each rank was given its own to see
        return False
    pairs = [(one, other) for one in cards for other in cards if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        logger.warning(
            "cards %d and %d do not reach each other's memory: ranks exchange through the host's, which is slow; "
            "--data-parallel-size needs no such exchange",
            *apart[0],
        )
    return not apart


class SymmetricGroup(ProcessGroup):
    """What is not exchanged through shared memory (other shapes, many rows, gathering), NCCL does."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self.device = device
        self.most_bytes = next((MOST_BYTES[size] for size in sorted(MOST_BYTES) if self.size <= size), 0)
        self.exchange: Exchange | None = None

    def prepare(self, row_bytes: int) -> None:
        """All ranks come here alike. What is loaded later, such as a model that drafts, has this where its rows are as
        wide."""
        if self.exchange is not None or not self.most_bytes:
            return
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of which no use is made
        from torch.distributed import _symmetric_memory as symmetric

        max_rows = max(1, min(self.most_bytes // row_bytes, MOST_ROWS))
        size = Exchange.buffer_bytes(self.size, max_rows, row_bytes)

        def allocate() -> Tensor:
            torch.cuda.empty_cache()  # which this memory does not come from
            return symmetric.empty(size, dtype=torch.uint8, device=self.device)

        if (buffer := self._together(allocate)) is None:
            return
        handle = symmetric.rendezvous(buffer, self.group)  # together: who fails here ends, or others wait for it

        def introduce() -> bool:
            """In every rank's memory stands, at this rank's place, its number."""
            for other in range(self.size):
                handle.get_buffer(other, [self.size], torch.uint8)[self.rank].fill_(self.rank + 1)
            return True

        def recognise() -> bool:
            found, expected = buffer[: self.size].tolist(), list(range(1, self.size + 1))
            Exchange.empty(buffer)
            if found != expected:
                raise RuntimeError(f"what ranks wrote there did not come: {found} instead of {expected}")
            return True

        if self._together(introduce) and self._together(
            recognise
        ):  # and so nobody sends before all have emptied theirs
            self._kept = buffer, handle
            addresses = [address + getattr(handle, "offset", 0) for address in handle.buffer_ptrs]
            buffers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
            counts = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
            torch.cuda.synchronize(self.device)
            self.exchange = Exchange(self.rank, buffers, counts, max_rows, row_bytes)

    def _together(self, step: Callable[[], T]) -> T | None:
        """What comes of the step; None unless every rank has taken it: what one has, it needs of the others. Warns
        where this one cannot."""
        found, done = None, torch.ones((), dtype=torch.int32, device=self.device)
        try:
            found = step()
        except Exception as error:  # whatever it is, NCCL can do without
            logger.warning(
                "the cards' memory cannot be shared (%s): NCCL makes all sums, which is slower; "
                "--disable-custom-all-reduce leaves the attempt out", str(error).partition("\n")[0],
            )  # fmt: skip
            done.zero_()
        torch.cuda.synchronize(self.device)
        dist.all_reduce(done, dist.ReduceOp.MIN, group=self.group)
        return found if done.item() else None

    def all_reduce(self, x: Tensor) -> Tensor:
        exchange = self.exchange
        if exchange is None or not exchange.takes(x):
            return super().all_reduce(x)
        return all_reduce(x, exchange)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        exchange = self.exchange
        if exchange is None or not exchange.takes(x):
            return super().add_rms_norm(x, residual, weight, eps, scale)
        return all_reduce_add_rms_norm(x, residual, weight, eps, scale, exchange)
