"""From a plan to device inputs: the host sends index maps and diffs, small kernels gather the rest from the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention.attention import DecodeWorkspace
from ...kernels.attention.kv_unpack import PromptPages
from ...kernels.rows.batch_inputs import build_inputs, build_slots, commit_tokens
from ...kernels.sampling.verify import impose_acceptance, verify_drafts
from ...kernels.state.slots import copy_slots
from ...kernels.state.step import StateStep
from ..layers.attention import AttentionBatch
from ..link.plan import StepPlan
from .rows import SEED, RowTables, Upload, aligned
from .states import StateStorage

# Lines of the header, the one small table that the host sends each step. B requests, S of them sampled; WANTED are the
# last tokens of those and of the ones that are pooled. The last two, where rows have recurrent states: after how many
# tokens one is exported, 0: not at all, and to which slot.
ROWS, QUERY_START, SAMPLE_INDEX, WANTED, SAMPLED, SAMPLE_ROW, EXPORT_AT, EXPORT_SLOT = range(8)


@dataclass(frozen=True)
class Shape:
    """What a step is padded to: rows that decode come first, then rows with queries of any length, `tokens` in all."""

    decode_rows: int
    prefill_rows: int
    tokens: int
    max_query_len: int  # of the prefill rows, 0 = there are none
    num_drafts: int = 0  # of each decode row, behind its one token

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def samples(self) -> int:
        """At most. No fewer than rows."""
        return self.rows + self.decode_rows * self.num_drafts

    def holds(self, other: Shape) -> bool:
        """Whether a step that is padded to the other one may be padded to this one, of as many tokens, instead."""
        return (
            self.decode_rows >= other.decode_rows
            and self.prefill_rows >= other.prefill_rows
            and self.tokens == other.tokens
            and self.max_query_len >= other.max_query_len
            and self.num_drafts == other.num_drafts
        )

    @classmethod
    def of(cls, plan: StepPlan) -> Shape:
        """The plan's own, without padding."""
        queries = plan.num_tokens[plan.num_decodes :]
        tokens = plan.num_decode_tokens + sum(queries)
        return cls(plan.num_decodes, len(queries), tokens, max(queries, default=0), plan.num_drafts)


@dataclass
class Batch:
    """The device view of one step: T tokens (padding included)."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    attention: AttentionBatch
    rope_positions: Tensor  # int32 [T], by which layers turn them


@dataclass
class SampleBatch:
    """The rows that sample in a step, and where: S samples, with drafts several in a row of one request."""

    plan: StepPlan
    rows: Tensor  # int32 [S]
    rows_cpu: np.ndarray  # int32 [S]
    seq_lens: Tensor  # int32 [S], tokens before the one that is sampled


class BatchBuilder:
    def __init__(self, tables: RowTables, page_size: int, workspace: DecodeWorkspace | None) -> None:
        self.tables = tables
        self.page_size = page_size
        self.workspace = workspace
        self.prompt_pages: PromptPages | None = None
        self.states: StateStorage | None = None
        self.thresholds: Tensor | None = None  # of impose_acceptance, where that is wanted

    @property
    def header_lines(self) -> int:
        return EXPORT_AT if self.tables.state_slot is None else EXPORT_SLOT + 1

    def header(self, plan: StepPlan, shape: Shape) -> Tensor:
        """int32 [header_lines, ≥ samples + 1] on the host; padding rows are the dummy row with no token and no sample.

        A fresh pinned buffer each time: torch's host allocator hands it out again only once the copy out of it has been
        made, so the host never writes what an in-flight copy still reads.
        """
        device = self.tables.device
        size = self.header_lines, header_width(shape.samples)
        header = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        lines = header.numpy()
        decodes, query_len, num_sampled = plan.num_decodes, 1 + plan.num_drafts, len(plan.sampled)
        first, last = shape.decode_rows, shape.decode_rows + len(plan.rows) - decodes  # the rows with longer queries
        lines[ROWS] = self.tables.dummy_row
        lines[ROWS, :decodes] = plan.rows[:decodes]
        lines[ROWS, first:last] = plan.rows[decodes:]
        query_start = lines[QUERY_START]
        query_start[: decodes + 1] = np.arange(0, plan.num_decode_tokens + 1, query_len, dtype=np.int32)
        query_start[decodes + 1 :] = plan.num_decode_tokens
        query_start[first + 1 : last + 1] += np.cumsum(plan.num_tokens[decodes:], dtype=np.int32)
        query_start[last + 1 :] = query_start[last]
        lines[SAMPLE_INDEX:] = 0
        lines[SAMPLE_INDEX] = -1
        at = np.array(plan.sampled + plan.pooled, dtype=np.int32)
        at[at >= decodes] += first - decodes
        wanted = query_start[at + 1] - 1
        at = at[:num_sampled]
        lines[SAMPLE_INDEX, at] = np.arange(num_sampled, dtype=np.int32)
        if plan.num_drafts:  # each of the first rows samples behind every one of its tokens, as all of them decode
            every = np.arange(plan.num_decode_tokens, dtype=np.int32)
            wanted, at = np.concatenate((every, wanted[decodes:])), np.concatenate((every // query_len, at[decodes:]))
            lines[SAMPLE_INDEX, :decodes] = every[::query_len]
            lines[SAMPLE_INDEX, at[len(every) :]] += decodes * plan.num_drafts
        lines[WANTED, : len(wanted)] = wanted
        lines[SAMPLED, : len(at)] = at
        lines[SAMPLE_ROW, : len(at)] = lines[ROWS, at]
        for export in plan.exports:
            row = plan.rows.index(export.row)
            row += first - decodes if row >= decodes else 0
            lines[EXPORT_AT, row], lines[EXPORT_SLOT, row] = export.boundary, export.slot
        return header

    def write_rows(self, plan: StepPlan) -> None:
        """Brings the plan's changes (new requests, new blocks) into the row tables, and snapshots into their states."""
        upload = Upload()
        if not (writes := self.tables.stage(plan, upload)):
            return
        restored = [new for new in plan.new_rows if new.restored_from not in (-1, new.state_slot)]
        if restored:
            sources = upload.add([new.restored_from for new in restored])
            targets = upload.add([new.state_slot for new in restored])
        sent = upload.send(self.tables.device)
        self.tables.apply(writes, sent)
        if restored and self.states is not None:
            copy_slots(self.states.tensors, sent[sources], sent[targets])

    def gather(self, header: Tensor, shape: Shape, beside: bool) -> Batch:
        """Builds the inputs from a header on the device. Sizes depend on the shape only, so it can be captured.

        `beside`: decode and prefill attention may run at the same time, which they do in a CUDA graph.
        """
        tables, device = self.tables, self.tables.device
        rows, query_start = header[ROWS, : shape.rows], header[QUERY_START, : shape.rows + 1]
        input_ids = torch.empty(shape.tokens, dtype=torch.int32, device=device)
        positions = torch.empty_like(input_ids)
        seq_lens = torch.empty(shape.rows, dtype=torch.int32, device=device)
        build_inputs(tables.history, tables.num_computed, rows, query_start, input_ids, positions, seq_lens)
        slots = []
        for table in tables.block_tables:
            slots.append(torch.empty_like(input_ids))
            build_slots(table, rows, query_start, positions, slots[-1], self.page_size)
        attention = AttentionBatch(
            shape.decode_rows, 1 + shape.num_drafts, shape.max_query_len, rows, seq_lens, query_start, slots,
            self.workspace, beside and shape.decode_rows > 0 and shape.prefill_rows > 0, self.prompt_pages,
            state=self._states(header, shape, rows, query_start),
        )  # fmt: skip
        return Batch(input_ids, positions, attention, self._rope_positions(shape, rows, query_start, positions))

    def _rope_positions(self, shape: Shape, rows: Tensor, query_start: Tensor, positions: Tensor) -> Tensor:
        """Positions, and what pictures before them add. Of tokens before the end of a row's last picture these are
        others: see AxisPositions."""
        if (deltas := self.tables.rope_delta) is None:
            return positions
        deltas = deltas.index_select(0, rows)
        if shape.tokens > shape.rows or shape.prefill_rows:
            tokens = torch.arange(shape.tokens, dtype=torch.int32, device=positions.device)
            owners = torch.bucketize(tokens, query_start[1:], right=True).clamp_(max=shape.rows - 1)
            deltas = deltas.index_select(0, owners)
        return (positions + deltas).clamp_(min=0)  # tokens that pad a step are nobody's

    def _states(self, header: Tensor, shape: Shape, rows: Tensor, query_start: Tensor) -> StateStep | None:
        """What the step does to recurrent states. What may be taken back is never in one: a token whose next one is
        sampled in this step, and drafts."""
        tables, first = self.tables, shape.decode_rows
        if tables.state_slot is None or tables.state_len is None:
            return None
        start = tables.num_computed.index_select(0, rows)
        fold_to = start
        if shape.prefill_rows:
            samples = (header[SAMPLE_INDEX, first : shape.rows] >= 0).int()
            ends = start[first:] + query_start[first + 1 :] - query_start[first:-1] - samples
            fold_to = torch.cat((start[:first], ends))
        return StateStep(
            tables.state_slot.index_select(0, rows), start, tables.state_len.index_select(0, rows), fold_to,
            header[EXPORT_AT, : shape.rows], header[EXPORT_SLOT, : shape.rows], query_start, first,
            1 + shape.num_drafts,
        )  # fmt: skip

    def folded(self, batch: Batch) -> None:
        """Behind all layers: the rows' states have taken in what the step folds."""
        if (step := batch.attention.state) is not None and self.tables.state_len is not None:
            self.tables.state_len[batch.attention.rows] = step.fold_to

    def samples(self, plan: StepPlan, header: Tensor, host: Tensor, batch: Batch) -> SampleBatch:
        count = plan.num_samples
        if plan.num_drafts:
            seq_lens = batch.positions.index_select(0, header[WANTED, :count]) + 1
        else:
            seq_lens = batch.attention.seq_lens.index_select(0, header[SAMPLED, :count])
        return SampleBatch(plan, header[SAMPLE_ROW, :count], host.numpy()[SAMPLE_ROW, :count], seq_lens)

    def commit(self, header: Tensor, shape: Shape, tokens: Tensor) -> Tensor | None:
        """Appends the sampled tokens to the rows' history, on the device: the next step needs nothing from the host.

        With drafts: int32 [2, decode_rows], of each row how many tokens it keeps, and how many had been proposed.
        """
        tables, count, kept = self.tables, shape.rows, None
        rows, query_start, index = header[ROWS, :count], header[QUERY_START, : count + 1], header[SAMPLE_INDEX, :count]
        if shape.num_drafts:
            first = shape.decode_rows
            kept = tokens.new_empty(2, first)
            if self.thresholds is not None:
                impose_acceptance(
                    tables.history, tables.num_computed, tables.params[:, SEED], rows[:first],
                    query_start[: first + 1], tokens, index[:first], self.thresholds, shape.num_drafts,
                )  # fmt: skip
            verify_drafts(
                tables.history, tables.num_computed, tables.num_proposed, rows[:first], query_start[: first + 1],
                tokens, index[:first], kept, shape.num_drafts,
            )  # fmt: skip
            rows, query_start, index = rows[first:], query_start[first:], index[first:]
        if len(rows):
            commit_tokens(tables.history, tables.num_computed, rows, query_start, tokens, index)
        return kept

    def advance(self, plan: StepPlan) -> None:
        """What `commit` does for the rows that sample nothing, where the others' tokens are not known yet."""
        sampling = set(plan.sampled)
        others = [index for index in range(len(plan.rows)) if index not in sampling]
        if others:
            upload = Upload()
            upload.add([plan.rows[index] for index in others])
            upload.add([plan.num_tokens[index] for index in others])
            rows, counts = upload.send(self.tables.device)
            self.tables.num_computed.index_add_(0, rows, counts)

    def take_back(self, plan: StepPlan, postponed: tuple[int, ...], kept: Tensor | None) -> None:
        """After `commit`, which returned `kept`: the last token of these rows, indexes into plan.sampled, is to be
        computed again; what was sampled after it is overwritten by then."""
        upload = Upload()  # pinned: a copy from other memory would wait for the whole step
        upload.add([plan.rows[plan.sampled[index]] for index in postponed])
        upload.add([index if index < plan.num_decodes else plan.num_decodes for index in postponed])
        rows, places = upload.send(self.tables.device)
        counts = torch.ones_like(rows)
        if kept is not None:
            every = torch.cat((kept[0, : plan.num_decodes], kept.new_ones(1)))
            counts = every.index_select(0, places)
        self.tables.num_computed.index_add_(0, rows, counts, alpha=-1)

    def cut_drafts(self, plan: StepPlan, cuts: tuple[tuple[int, int], ...], tokens: Tensor) -> None:
        """Before `commit`: of these rows, indexes into plan.sampled, no more than so many drafts hold, whatever was
        sampled: the next one becomes another token than its sample."""
        upload = Upload()
        upload.add([plan.rows[index] for index, _ in cuts])
        upload.add([1 + most for _, most in cuts])
        upload.add([index * (1 + plan.num_drafts) + most for index, most in cuts])
        rows, places, samples = upload.send(self.tables.device)
        places = places + self.tables.num_computed.index_select(0, rows)
        history = self.tables.history
        history.recent[rows, places % history.ring] = (tokens.index_select(0, samples) == 0).int()

    def tell_drafts(self, plan: StepPlan, count: int) -> Tensor:
        """Of plan.told: how many drafts were proposed, and `count` tokens that stand there. int32 [T, 1 + count]."""
        upload = Upload()
        upload.add([plan.rows[plan.sampled[index]] for index in plan.told])
        upload.add(np.arange(1, 1 + count))
        rows, behind = upload.send(self.tables.device)
        tables = self.tables
        places = tables.num_computed.index_select(0, rows)[:, None] + behind
        drafts = tables.history.recent[rows[:, None], places % tables.history.ring]
        return torch.cat((tables.num_proposed.index_select(0, rows)[:, None], drafts), dim=1)


def header_width(num_samples: int) -> int:
    """Every line starts where Triton's variant for aligned pointers may be used."""
    return aligned(num_samples + 1)
