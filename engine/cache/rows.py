"""Stable rows: what the device knows of each running request. A request keeps one row for as long as it runs."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention.history import History, ring_for
from ...kernels.rows.batch_inputs import scatter_rows
from ..link.plan import StepPlan
from ..link.sampling_params import SamplingParams

# Columns of the parameter table: six float32 (as bits), then integers. A 64-bit seed takes two.
# GIVEN: tokens that the host has sent.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TOP_K, PROMPT_LEN, SEED, GIVEN = 6, 7, 8, 10
NUM_COLUMNS = 12
PACK = struct.Struct("<6fiiqi4x")

# What a row asks of the sampler, so that a step pays only for what its rows use.
RANDOM, PENALTIES, BIAS, LOGPROBS, MIN_TOKENS, ALLOWED, BAD_WORDS = 1, 2, 4, 8, 16, 32, 64


Staged = tuple[int, int, int, int]  # of a write: rows, starts, offsets and values, in an upload
NO_TOKENS = np.zeros(0, dtype=np.int32)
ALIGNMENT = 16  # int32s: Triton compiles another variant for pointers that are not 16-byte aligned


def aligned(size: int) -> int:
    """The room that `size` int32s take where others follow them."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Upload:
    """Many small int32 arrays in one copy to the device."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._starts: list[int] = []
        self._end = 0

    def add(self, values: np.ndarray | list[int]) -> int:
        """Returns the index of the array in what `send` gives back."""
        values = np.asarray(values, dtype=np.int32)
        self._arrays.append(values)
        self._starts.append(self._end)
        self._end += aligned(max(values.size, 1))
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[Tensor]:
        # A fresh pinned buffer each time: torch's host allocator hands it out again only once the copy has been made,
        # so the host never writes what an in-flight copy still reads.
        host = torch.empty(self._end, dtype=torch.int32, pin_memory=device.type == "cuda")
        flat = host.numpy()
        for start, values in zip(self._starts, self._arrays, strict=True):
            flat[start : start + values.size] = values
        sent = host.to(device, non_blocking=True)
        return [sent[start : start + a.size] for start, a in zip(self._starts, self._arrays, strict=True)]


class RowTables:
    """Device tables with one row a running request, and one dummy row (the last) that padding points to."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_blocks: int, num_groups: int, device: torch.device,
        block_size: int = 16, history_group: int | None = None, num_drafts: int = 0, has_states: bool = False,
        three_axes: bool = False,
    ) -> None:  # fmt: skip
        """`has_states`: rows have recurrent states. `three_axes`: tokens are turned by time, height and width of
        pictures. `history_group`: the KV group whose blocks have pages for tokens,
        which `make_pages` makes; None: no group keeps whole sequences, and each row has pages of its own for a whole
        context."""
        num_rows = max_num_seqs + 1
        self.device = device
        self.dummy_row = max_num_seqs
        self.num_computed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        # Of the tokens behind those that there are: drafts that a drafter has proposed. Others stand there by chance.
        self.num_proposed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        # The slot of the row's state, and how many tokens that is of; of the dummy row the null slot, and none.
        self.state_slot: Tensor | None = None
        self.state_len: Tensor | None = None
        if has_states:
            self.state_slot, self.state_len = torch.zeros_like(self.num_computed), torch.zeros_like(self.num_computed)
        # What tokens behind a row's pictures are turned by over their positions.
        self.rope_delta = torch.zeros_like(self.num_computed) if three_axes else None
        self.params = torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int32, device=device)
        self.block_tables = [
            torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self.history_group, num_pages = history_group, 1  # until there are blocks, all entries are the null block
        if history_group is not None:
            table = self.block_tables[history_group]
        else:
            num_pages = num_rows * max_blocks
            table = torch.arange(num_pages, dtype=torch.int32, device=device).view(num_rows, max_blocks)
        self.history = History(
            torch.zeros(num_pages, block_size, dtype=torch.int32, device=device), table,
            torch.zeros(num_rows, ring_for(num_drafts), dtype=torch.int32, device=device), self.params[:, GIVEN],
            max_model_len,
        )  # fmt: skip
        # Of rows whose prompts are not computed yet: all tokens, which go to the pages as the blocks come.
        self._coming: dict[int, np.ndarray] = {}
        # The host's side of the rows: only what decides which sampling steps run.
        self.sampling: list[SamplingParams | None] = [None] * num_rows
        self.prompt_len = np.zeros(num_rows, dtype=np.int32)
        self.flags = np.zeros(num_rows, dtype=np.uint8)

    def make_pages(self, num_blocks: int) -> None:
        """With the cache, before graphs are captured: a page of tokens for each block."""
        if self.history_group is not None:
            pages = self.history.pages
            self.history = replace(self.history, pages=pages.new_zeros(num_blocks, pages.shape[1]))

    def stage(self, plan: StepPlan, upload: Upload) -> list[tuple[Tensor, Staged]]:
        """Adds the plan's changes to the upload; `apply` writes them to the tables once it has been sent."""
        writes: list[tuple[Tensor, Staged]] = []
        if plan.new_rows:
            rows = [new.row for new in plan.new_rows]
            zeros = [0] * len(rows)
            tokens = [np.frombuffer(new.token_ids, np.int32) for new in plan.new_rows]
            if self.history_group is None:
                own = self.history.pages.view(len(self.sampling), -1)
                writes.append((own, _stage(upload, rows, zeros, list(map(len, tokens)), np.concatenate(tokens))))
            self._coming.update(zip(rows, tokens, strict=True))
            counts = [new.num_computed_tokens for new in plan.new_rows]
            ones = [1] * len(rows)
            writes.append((self.num_computed[:, None], _stage(upload, rows, zeros, ones, counts)))
            if self.state_slot is not None and self.state_len is not None:
                slots = [max(0, new.state_slot) for new in plan.new_rows]
                writes.append((self.state_slot[:, None], _stage(upload, rows, zeros, ones, slots)))
                writes.append((self.state_len[:, None], _stage(upload, rows, zeros, ones, counts)))
            if self.rope_delta is not None:
                deltas = [new.rope_delta for new in plan.new_rows]
                writes.append((self.rope_delta[:, None], _stage(upload, rows, zeros, ones, deltas)))
            # No drafts stand there: a prompt's last token may come in a step with drafts of the row's former one.
            writes.append((self.num_proposed[:, None], _stage(upload, rows, zeros, ones, zeros)))
            packed = b"".join(
                self._pack(new.row, new.num_prompt_tokens, new.sampling, len(known))
                for new, known in zip(plan.new_rows, tokens, strict=True)
            )
            params = np.frombuffer(packed, dtype=np.int32)
            writes.append((self.params, _stage(upload, rows, zeros, [NUM_COLUMNS] * len(rows), params)))
        for table, blocks in zip(self.block_tables, plan.new_blocks, strict=True):
            if blocks:
                values = np.array([block for write in blocks for block in write.block_ids], dtype=np.int32)
                rows, starts = [write.row for write in blocks], [write.start for write in blocks]
                writes.append((table, _stage(upload, rows, starts, [len(w.block_ids) for w in blocks], values)))
        if self._coming:
            self._stage_tokens(plan, upload, writes)
        return writes

    def _stage_tokens(self, plan: StepPlan, upload: Upload, writes: list[tuple[Tensor, Staged]]) -> None:
        """Prompts, as far as they have blocks now. What a hit found is in the pages of its blocks already, where the
        request that computed these has put it."""
        page, ring = self.history.page, self.history.ring
        blocks: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        values: list[np.ndarray] = []
        hits = {new.row: new.num_computed_tokens for new in plan.new_rows}
        for write in plan.new_blocks[self.history_group] if self.history_group is not None else ():
            tokens = self._coming.get(write.row, NO_TOKENS)
            first = write.start * page
            begin = max(first, hits.get(write.row, 0))
            end = min(len(tokens), first + len(write.block_ids) * page)
            if begin < end:
                borders = np.array([begin, *range(begin - begin % page + page, end, page), end])
                blocks += write.block_ids[begin // page - write.start : -(-end // page) - write.start]
                starts += (borders[:-1] % page).tolist()
                lengths += np.diff(borders).tolist()
                values.append(tokens[begin:end])
        if values:
            writes.append((self.history.pages, _stage(upload, blocks, starts, lengths, np.concatenate(values))))
        # The token behind a chunk is asked for, as a target and by heads that draft, and may have no block yet. The
        # prompt's last one is the next one if its mask is late.
        indexes = [index for index, row in enumerate(plan.rows) if row in self._coming]
        if not indexes:
            return
        rows = [plan.rows[index] for index in indexes]
        places, behind = [], []
        for index, row in zip(indexes, rows, strict=True):
            tokens, end = self._coming[row], plan.num_computed[index] + plan.num_tokens[index]
            place = min(end, len(tokens) - 1)
            places.append(place % ring)
            behind.append(int(tokens[place]))
            if end >= len(tokens):
                del self._coming[row]
        writes.append((self.history.recent, _stage(upload, rows, places, [1] * len(rows), behind)))

    def apply(self, writes: list[tuple[Tensor, Staged]], sent: list[Tensor]) -> None:
        for table, (rows, starts, offsets, values) in writes:
            scatter_rows(table, sent[rows], sent[starts], sent[offsets], sent[values])

    def _pack(self, row: int, prompt_len: int, sampling: SamplingParams, given: int) -> bytes:
        self.sampling[row] = sampling
        self.prompt_len[row] = prompt_len
        self.flags[row] = (
            RANDOM * (sampling.temperature > 0)
            | PENALTIES * sampling.has_penalties
            | BIAS * bool(sampling.logit_bias)
            | LOGPROBS * (sampling.logprobs is not None)
            | MIN_TOKENS * (sampling.min_tokens > 0)
            | ALLOWED * (sampling.allowed_token_ids is not None)
            | BAD_WORDS * bool(sampling.bad_words)
        )
        floats = (getattr(sampling, name) for name in FLOATS)
        return PACK.pack(*floats, sampling.top_k, prompt_len, sampling.seed or 0, given)


def _stage(
    upload: Upload, rows: list[int], starts: list[int], lengths: list[int], values: np.ndarray | list[int]
) -> Staged:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return upload.add(rows), upload.add(starts), upload.add(offsets), upload.add(values)
