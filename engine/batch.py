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
from .rows import RowTables, Upload

# Lines of the header, the one small table that the host sends each step. B requests, S of them sampled.
ROWS, QUERY_START, SAMPLE_INDEX, LAST_TOKEN, SAMPLED, SAMPLE_ROW = range(6)
ALIGN = 16  # int32s: every line starts where Triton's aligned variant may be used


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

    def header(self, plan: StepPlan, num_rows: int) -> Tensor:
        """int32 [6, ≥ num_rows + 1] on the host; padding rows are the dummy row with no token and no sample.

        A fresh pinned buffer each time: torch's host allocator hands it out again only once the copy out of it has been
        made, so the host never writes what an in-flight copy still reads.
        """
        real, sampled = len(plan.rows), plan.sampled
        header = torch.empty(6, header_width(num_rows), dtype=torch.int32, pin_memory=self.tables.device.type == "cuda")
        lines = header.numpy()
        lines[ROWS, :real] = plan.rows
        lines[ROWS, real:] = self.tables.dummy_row
        query_start = lines[QUERY_START]
        query_start[0] = 0
        np.cumsum(plan.num_tokens, out=query_start[1 : real + 1])
        query_start[real + 1 :] = query_start[real]
        lines[SAMPLE_INDEX:] = 0
        lines[SAMPLE_INDEX] = -1
        lines[SAMPLE_INDEX, sampled] = np.arange(len(sampled), dtype=np.int32)
        lines[SAMPLED, : len(sampled)] = sampled
        at = lines[SAMPLED, : len(sampled)]
        lines[LAST_TOKEN, : len(sampled)] = query_start[at + 1] - 1
        lines[SAMPLE_ROW, : len(sampled)] = lines[ROWS, at]
        return header

    def write_rows(self, plan: StepPlan) -> None:
        """Brings the plan's changes (new requests, new blocks) into the row tables."""
        upload = Upload()
        if writes := self.tables.stage(plan, upload):
            self.tables.apply(writes, upload.send(self.tables.device))

    def gather(self, header: Tensor, num_rows: int, num_tokens: int, num_decodes: int, max_query_len: int) -> Batch:
        """Builds the inputs from a header on the device. Shapes depend on the arguments only, so it can be captured."""
        tables, device = self.tables, self.tables.device
        rows, query_start = header[ROWS, :num_rows], header[QUERY_START, : num_rows + 1]
        input_ids = torch.empty(num_tokens, dtype=torch.int32, device=device)
        positions = torch.empty_like(input_ids)
        seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
        build_inputs(tables.token_ids, tables.num_computed, rows, query_start, input_ids, positions, seq_lens)
        slots = []
        for table in tables.block_tables:
            slots.append(torch.empty_like(input_ids))
            build_slots(table, rows, query_start, positions, slots[-1], self.page_size)
        attention = AttentionBatch(
            num_decodes, 1, max_query_len, rows, seq_lens, query_start, slots, tables.block_tables, self.workspace
        )
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


def header_width(num_rows: int) -> int:
    return -(-(num_rows + 1) // ALIGN) * ALIGN
