"""CUDA graphs of whole steps, from gathering the inputs to the last hidden state, one a padded shape.

Launching a step's kernels one by one takes the host some 20 ms; replaying a graph takes it one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch, BatchBuilder, Shape, header_width
from .config import FEW_DECODES
from .plan import StepPlan

MIXED_DECODE_ROWS = (0, 8, 32, 64, 128, 256, 512)
MIXED_PREFILL_ROWS = 16


@dataclass
class StepGraph:
    shape: Shape
    graph: torch.cuda.CUDAGraph
    header: Tensor  # int32 [6, width], static: filled before each replay
    batch: Batch  # static tensors that the replay fills
    hidden: Tensor  # [tokens, hidden], static


def decode_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: padding wastes at most a few rows, and the number of graphs stays small."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, largest + 1, 32)]
    return sorted({*(size for size in sizes if size <= largest), largest})


class StepGraphs:
    """An explicit table from padded shapes to graphs: steps that only decode, and steps with some prompt tokens too."""

    def __init__(
        self, builder: BatchBuilder, forward: Callable[[Batch], Tensor], max_decodes: int, max_mixed_tokens: int
    ) -> None:
        self.builder = builder
        self.forward = forward
        self.decodes = decode_sizes(max_decodes)
        self.mixed_decodes = sorted({min(rows, max_decodes) for rows in MIXED_DECODE_ROWS})
        self.mixed_tokens: list[int] = []
        if max_mixed_tokens:
            sizes = [n for n in (128, 256, 512, 768) if n < max_mixed_tokens]
            self.mixed_tokens = [*sizes, max_mixed_tokens, max_mixed_tokens + FEW_DECODES]
        self._graphs: dict[Shape, StepGraph] = {}

    def shapes(self) -> list[Shape]:
        """Largest first."""
        found = [Shape(size, 0, size, 0) for size in self.decodes]
        for tokens in self.mixed_tokens:
            few = tokens == self.mixed_tokens[-1]  # the scheduler exceeds its limit only beside few decodes
            rows = [n for n in self.mixed_decodes if n < tokens and (n <= FEW_DECODES or not few)]
            found += [_mixed(n, tokens) for n in rows]
        return sorted(found, key=lambda shape: -shape.tokens)

    def find(self, plan: StepPlan) -> StepGraph | None:
        """The smallest graph that holds this plan, if there is one."""
        decodes, prefills = plan.num_decodes, len(plan.rows) - plan.num_decodes
        if not prefills:
            at = bisect_left(self.decodes, decodes)
            if at == len(self.decodes):
                return None
            return self._graphs.get(Shape(self.decodes[at], 0, self.decodes[at], 0))
        rows = bisect_left(self.mixed_decodes, decodes)
        if rows == len(self.mixed_decodes) or prefills > MIXED_PREFILL_ROWS:
            return None
        num_rows = self.mixed_decodes[rows]
        tokens = bisect_left(self.mixed_tokens, max(plan.total_tokens, num_rows + 1))
        if tokens == len(self.mixed_tokens):
            return None
        return self._graphs.get(_mixed(num_rows, self.mixed_tokens[tokens]))

    @torch.inference_mode()
    def capture(self) -> None:
        """All from one pool, the largest first, so that the smaller graphs reuse the memory of the larger ones."""
        pool = torch.cuda.graph_pool_handle()
        device = self.builder.tables.device
        for shape in self.shapes():
            header = torch.zeros(6, header_width(shape.rows), dtype=torch.int32, device=device)
            # Dummy rows without a token: the capture run must not touch a row.
            header[0] = self.builder.tables.dummy_row
            self._run(header, shape)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                batch, hidden = self._run(header, shape)
            self._graphs[shape] = StepGraph(shape, graph, header, batch, hidden)

    def _run(self, header: Tensor, shape: Shape) -> tuple[Batch, Tensor]:
        batch = self.builder.gather(header, shape)
        return batch, self.forward(batch)


def _mixed(decode_rows: int, tokens: int) -> Shape:
    return Shape(decode_rows, MIXED_PREFILL_ROWS, tokens, tokens)
