"""CUDA graphs of whole decode steps, from gathering the inputs to the last hidden state, one a padded batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch, BatchBuilder, header_width
from .plan import StepPlan


@dataclass
class DecodeGraph:
    num_rows: int
    graph: torch.cuda.CUDAGraph
    header: Tensor  # int32 [6, width], static: filled before each replay
    batch: Batch  # static tensors that the replay fills
    hidden: Tensor  # [num_rows, hidden], static


def capture_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: padding wastes at most a few rows, and the number of graphs stays small."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, largest + 1, 32)]
    return sorted({*(size for size in sizes if size <= largest), largest})


class DecodeGraphs:
    """An explicit table from (padded tokens, padded rows, query length) to a graph; here all three follow from one."""

    def __init__(self, builder: BatchBuilder, forward: Callable[[Batch], Tensor], largest: int) -> None:
        self.builder = builder
        self.forward = forward
        self.sizes = capture_sizes(largest)
        self._graphs: dict[int, DecodeGraph] = {}
        self._next = [0] * (largest + 1)  # batch size → the size it is padded to
        for size in reversed(self.sizes):
            self._next[: size + 1] = [size] * (size + 1)

    def find(self, plan: StepPlan) -> DecodeGraph | None:
        """The graph for this plan: only for steps in which every row decodes one token."""
        count = len(plan.rows)
        if plan.num_decodes != count or count >= len(self._next):
            return None
        return self._graphs.get(self._next[count])

    @torch.inference_mode()
    def capture(self) -> None:
        """Largest first, all from one pool, so that the smaller graphs reuse the memory of the larger ones."""
        pool = torch.cuda.graph_pool_handle()
        device = self.builder.tables.device
        for size in reversed(self.sizes):
            header = torch.zeros(6, header_width(size), dtype=torch.int32, device=device)
            # Dummy rows without a token: the capture run must not touch a row.
            header[0] = self.builder.tables.dummy_row
            self._run(header, size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                batch, hidden = self._run(header, size)
            self._graphs[size] = DecodeGraph(size, graph, header, batch, hidden)

    def _run(self, header: Tensor, size: int) -> tuple[Batch, Tensor]:
        batch = self.builder.gather(header, size, size, size, 0)
        return batch, self.forward(batch)
