"""Ranks whose cards reach each other's memory: sums are made there, in one kernel with the norm behind."""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor
from torch import distributed as dist

from ...kernels.all_reduce import Exchange, all_reduce, all_reduce_add_rms_norm
from .group import ProcessGroup

logger = logging.getLogger(__name__)

# Ranks → bytes up to which every rank gets the rows of all. Of two ranks that is what has to be sent anyway, and twice
# as fast as NCCL at every size measured. Of more, NCCL sends each byte only once or twice.
MOST_BYTES = {2: 72 << 20, 4: 384 << 10, 8: 128 << 10}
MOST_ROWS = 8448  # tokens of a step


def reach_each_other(cards: range) -> bool:
    """Whether each of these cards reaches the memory of the others; warns where not."""
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
        self.most_bytes = next(MOST_BYTES[size] for size in sorted(MOST_BYTES) if self.size <= size)
        self.exchange: Exchange | None = None

    def prepare(self, row_bytes: int) -> None:
        """All ranks come here alike. What is loaded later, such as a model that drafts, has this where its rows are as
        wide."""
        if self.exchange is not None:
            return
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of which no use is made
        max_rows = max(1, min(self.most_bytes // row_bytes, MOST_ROWS))
        exchange = self._rendezvous(max_rows, row_bytes)
        done = torch.tensor(int(exchange is not None), dtype=torch.int32, device=self.device)
        dist.all_reduce(done, dist.ReduceOp.MIN, group=self.group)  # nobody sends before all have emptied their memory
        self.exchange = exchange if done.item() else None

    def _rendezvous(self, max_rows: int, row_bytes: int) -> Exchange | None:
        """None, and a warning, where memory cannot be shared."""
        from torch.distributed import _symmetric_memory as symmetric

        try:
            size = Exchange.buffer_bytes(self.size, max_rows, row_bytes)
            self._buffer = symmetric.empty(size, dtype=torch.uint8, device=self.device)
            self._handle = symmetric.rendezvous(self._buffer, self.group)
        except RuntimeError as error:
            logger.warning(
                "the cards' memory cannot be shared (%s): NCCL makes all sums, which is slower; "
                "--disable-custom-all-reduce leaves the attempt out", str(error).partition("\n")[0],
            )  # fmt: skip
            return None
        Exchange.empty(self._buffer)
        buffers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        counts = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        torch.cuda.synchronize(self.device)
        return Exchange(self.rank, buffers, counts, max_rows, row_bytes)

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
