"""From a plan to device inputs: the host sends index maps and diffs, small kernels gather the rest from the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention import DecodeWorkspace
from ..kernels.batch_inputs import build_inputs, build_slots, commit_tokens
from .layers.attention import AttentionBatch
from .plan import StepPlan
from .rows import RowTables, Upload, aligned

# Lines of the header, the one small table that the host sends each step. B requests, S of them sampled; WANTED are the
# last tokens of those and of the ones that are pooled.
ROWS, QUERY_START, SAMPLE_INDEX, WANTED, SAMPLED, SAMPLE_ROW = range(6)


@dataclass(frozen=True)
class Shape:
    """What a step is padded to: rows that decode come first, then rows with longer queries, `tokens` in all."""

    decode_rows: int
    prefill_rows: int
    tokens: int
    max_query_len: int  # of the prefill rows, 0 = there are none

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @classmethod
    def of(cls, plan: StepPlan) -> Shape:
        """The plan's own, without padding."""
        queries = plan.num_tokens[plan.num_decodes :]
        return cls(plan.num_decodes, len(queries), plan.num_decodes + sum(queries), max(queries, default=0))


@dataclass
class Batch:
    """The device view of one step: T tokens (padding included)."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    attention: AttentionBatch


@dataclass
class SampleBatch:
    """Who samples in a step, and where: S requests of B."""

    plan: StepPlan
    rows: Tensor  # int32 [S]
    rows_cpu: np.ndarray  # int32 [S]
    seq_lens: Tensor  # int32 [S], tokens before the one that is sampled


class BatchBuilder:
    def __init__(self, tables: RowTables, page_size: int, workspace: DecodeWorkspace | None) -> None:
        self.tables = tables
        self.page_size = page_size
        self.workspace = workspace

    def header(self, plan: StepPlan, shape: Shape) -> Tensor:
        """int32 [6, ≥ rows + 1] on the host; padding rows are the dummy row with no token and no sample.

        A fresh pinned buffer each time: torch's host allocator hands it out again only once the copy out of it has been
        made, so the host never writes what an in-flight copy still reads.
        """
        device = self.tables.device
        header = torch.empty(6, header_width(shape.rows), dtype=torch.int32, pin_memory=device.type == "cuda")
        lines = header.numpy()
        decodes, num_sampled = plan.num_decodes, len(plan.sampled)
        first, last = shape.decode_rows, shape.decode_rows + len(plan.rows) - decodes  # the rows with longer queries
        lines[ROWS] = self.tables.dummy_row
        lines[ROWS, :decodes] = plan.rows[:decodes]
        lines[ROWS, first:last] = plan.rows[decodes:]
        query_start = lines[QUERY_START]
        query_start[: decodes + 1] = np.arange(decodes + 1, dtype=np.int32)
        query_start[decodes + 1 :] = decodes
        query_start[first + 1 : last + 1] += np.cumsum(plan.num_tokens[decodes:], dtype=np.int32)
        query_start[last + 1 :] = query_start[last]
        lines[SAMPLE_INDEX:] = 0
        lines[SAMPLE_INDEX] = -1
        at = np.array(plan.sampled + plan.pooled, dtype=np.int32)
        at[at >= decodes] += first - decodes
        lines[WANTED, : len(at)] = query_start[at + 1] - 1
        at = at[:num_sampled]
        lines[SAMPLE_INDEX, at] = np.arange(num_sampled, dtype=np.int32)
        lines[SAMPLED, :num_sampled] = at
        lines[SAMPLE_ROW, :num_sampled] = lines[ROWS, at]
        return header

    def write_rows(self, plan: StepPlan) -> None:
        """Brings the plan's changes (new requests, new blocks) into the row tables."""
        upload = Upload()
        if writes := self.tables.stage(plan, upload):
            self.tables.apply(writes, upload.send(self.tables.device))

    def gather(self, header: Tensor, shape: Shape, beside: bool) -> Batch:
        """Builds the inputs from a header on the device. Sizes depend on the shape only, so it can be captured.

        `beside`: decode and prefill attention may run at the same time, which they do in a CUDA graph.
        """
        tables, device = self.tables, self.tables.device
        rows, query_start = header[ROWS, : shape.rows], header[QUERY_START, : shape.rows + 1]
        input_ids = torch.empty(shape.tokens, dtype=torch.int32, device=device)
        positions = torch.empty_like(input_ids)
        seq_lens = torch.empty(shape.rows, dtype=torch.int32, device=device)
        build_inputs(tables.token_ids, tables.num_computed, rows, query_start, input_ids, positions, seq_lens)
        slots = []
        for table in tables.block_tables:
            slots.append(torch.empty_like(input_ids))
            build_slots(table, rows, query_start, positions, slots[-1], self.page_size)
        attention = AttentionBatch(
            shape.decode_rows, 1, shape.max_query_len, rows, seq_lens, query_start, slots, self.workspace,
            beside and shape.decode_rows > 0 and shape.prefill_rows > 0,
        )  # fmt: skip
        return Batch(input_ids, positions, attention)

    def samples(self, plan: StepPlan, header: Tensor, host: Tensor, batch: Batch) -> SampleBatch:
        count = len(plan.sampled)
        seq_lens = batch.attention.seq_lens.index_select(0, header[SAMPLED, :count])
        return SampleBatch(plan, header[SAMPLE_ROW, :count], host.numpy()[SAMPLE_ROW, :count], seq_lens)

    def commit(self, header: Tensor, num_rows: int, tokens: Tensor) -> None:
        """Appends the sampled tokens to the rows' history, on the device: the next step needs nothing from the host."""
        commit_tokens(
            self.tables.token_ids,
            self.tables.num_computed,
            header[ROWS, :num_rows],
            header[QUERY_START, : num_rows + 1],
            tokens,
            header[SAMPLE_INDEX, :num_rows],
        )

    def take_back(self, samples: SampleBatch, postponed: tuple[int, ...]) -> None:
        """After `commit`: the last token of these samples' rows is to be computed again; what was sampled after it is
        overwritten by then."""
        upload = Upload()  # pinned: a copy from other memory would wait for the whole step
        upload.add(samples.rows_cpu[list(postponed)])
        (rows,) = upload.send(self.tables.device)
        self.tables.num_computed.index_add_(0, rows, torch.ones_like(rows), alpha=-1)


def header_width(num_rows: int) -> int:
    """Every line starts where Triton's variant for aligned pointers may be used."""
    return aligned(num_rows + 1)
