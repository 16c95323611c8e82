"""CUDA graphs of whole steps, from gathering the inputs to the last hidden state, one a padded shape.

Launching a step's kernels one by one takes the host some 20 ms; replaying a graph takes it one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.batch import WANTED, Batch, BatchBuilder, Shape, header_width
from ..link.plan import StepPlan
from .graph_table import GraphTable
from .seeing import Seeing


@dataclass
class StepGraph:
    shape: Shape
    graph: torch.cuda.CUDAGraph
    header: Tensor  # int32 [lines, width], static: filled before each replay
    batch: Batch  # static tensors that the replay fills
    hidden: Tensor  # [samples, hidden], static: of the tokens that the header wants
    drafts: DraftGraph | None = None  # to be replayed once the step's tokens are there


@dataclass
class DraftGraph:
    graph: torch.cuda.CUDAGraph
    proposed: Tensor  # int32 [rows], static

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.proposed.clone()  # somebody may read it while the next step runs


class StepGraphs:
    """The graphs of a table's shapes, once they are captured."""

    def __init__(
        self, table: GraphTable, forward: Callable[[Batch, Tensor], Tensor],
        propose: Callable[[Batch, Tensor, Shape], Tensor] | None = None, seeing: Seeing | None = None,
    ) -> None:  # fmt: skip
        """`propose`: what a model drafts behind a step, from its batch and header. `seeing`: what steps with prompts
        read of pictures."""
        self.table, self.forward, self.propose, self.seeing = table, forward, propose, seeing
        self.builder: BatchBuilder | None = None  # needed to capture: before, the rows may still be made anew
        self._graphs: dict[Shape | None, StepGraph] = {}

    def shapes(self) -> list[Shape]:
        """Largest first."""
        return self.table.shapes

    def find(self, plan: StepPlan) -> StepGraph | None:
        """The smallest graph that holds this plan, if there is one."""
        return self._graphs.get(self.table.fits(plan))

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """All from one pool of graphs, the largest first, so that the smaller graphs reuse the memory of the larger
        ones. Those of another table may have it too: one graph runs at a time."""
        assert self.builder is not None
        device = self.builder.tables.device
        for shape in self.shapes():
            size = self.builder.header_lines, header_width(shape.samples)
            header = torch.zeros(size, dtype=torch.int32, device=device)
            # Dummy rows without a token: the capture run must not touch a row.
            header[0] = self.builder.tables.dummy_row
            graph = torch.cuda.CUDAGraph()
            # Errors of this thread alone: with several ranks, NCCL's own looks at events meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                batch, hidden = self._run(header, shape)
            self._graphs[shape] = StepGraph(shape, graph, header, batch, hidden)
            if self.propose is not None:
                graph.replay()
                self.propose(batch, header, shape)  # as it is: whatever it launches is there when it is captured
                drafts = torch.cuda.CUDAGraph()
                with torch.cuda.graph(drafts, pool=pool, capture_error_mode="thread_local"):
                    proposed = self.propose(batch, header, shape)
                self._graphs[shape].drafts = DraftGraph(drafts, proposed)

    def _run(self, header: Tensor, shape: Shape) -> tuple[Batch, Tensor]:
        assert self.builder is not None
        batch = self.builder.gather(header, shape, beside=True)
        if self.seeing is not None and shape.prefill_rows:
            self.seeing.bind(batch)
        return batch, self.forward(batch, header[WANTED, : shape.samples])
