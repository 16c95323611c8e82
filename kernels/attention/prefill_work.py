"""The work table of a prefill step: its blocks of query tokens, those that see the most keys first.

The programs of a persistent kernel take one line after another until none is left. Made once a step, since all layers
do the same work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_parts import RaggedBatch

BLOCK_M = 128  # rows of a tile: query tokens x grouped heads
LINE = 8  # int32 a line, of which five are used
_PLACES, _OTHERS = 64, 128  # places of a program, and how many it compares them with at once


@dataclass(slots=True)
class PrefillWork:
    """Makes the table of a batch when the first layer asks for it.

    last_only: of each request only the block with its last token, where the others are not needed.
    """

    batch: RaggedBatch
    last_only: bool = False
    _tables: dict[int, Tensor] = field(default_factory=dict)

    def table(self, group: int, num_tokens: int) -> Tensor:
        """For this number of query heads a KV head and of query tokens, the same at each call of a step."""
        if group not in self._tables:
            block_q = BLOCK_M // group
            self._tables[group] = prefill_work(self.batch, num_tokens, block_q, self.last_only)
        return self._tables[group]


def prefill_work(batch: RaggedBatch, num_tokens: int, block_q: int, last_only: bool = False) -> Tensor:
    """→ int32 [1 + num_tokens // block_q + B, 8]: the number of blocks and two counters at 0, then a line a block.

    A block is up to block_q neighbouring query tokens of one request. Its line: row of the block table, first query
    token, that token's position, number of tokens, context length of the request. Blocks that see more keys come
    first, among equals those of earlier tokens. What lies behind the last block is undefined.
    num_tokens: at least query_start[B] - query_start[0]; the sizes depend on it, B and block_q alone (CUDA graphs).
    last_only: as in PrefillWork.
    """
    return (prefill_work_triton if batch.rows.is_cuda else prefill_work_torch)(batch, num_tokens, block_q, last_only)


def prefill_work_torch(batch: RaggedBatch, num_tokens: int, block_q: int, last_only: bool = False) -> Tensor:
    work = batch.rows.new_zeros(1 + num_tokens // block_q + len(batch.rows), LINE)
    lines = []
    rows, lengths, starts = batch.rows.tolist(), batch.seq_lens.tolist(), batch.query_start.tolist()
    for row, length, start, end in zip(rows, lengths, starts[:-1], starts[1:], strict=True):
        for token in list(range(start, end, block_q))[-1 if last_only else 0 :]:
            lines.append((row, token, length - (end - token), min(block_q, end - token), length, 0, 0, 0))
    lines.sort(key=lambda line: -max(line[2] + line[3], 0))
    work[0, 0] = len(lines)
    if lines:
        work[1 : 1 + len(lines)] = torch.tensor(lines, dtype=torch.int32)
    return work


def prefill_work_triton(batch: RaggedBatch, num_tokens: int, block_q: int, last_only: bool = False) -> Tensor:
    num_requests = len(batch.rows)
    num_places = num_tokens // block_q + num_requests
    work = torch.empty(1 + num_places, LINE, dtype=torch.int32, device=batch.rows.device)
    _prefill_work_kernel[(max(1, triton.cdiv(num_places, _PLACES)),)](
        work, batch.rows, batch.seq_lens, batch.query_start, num_requests, num_places, num_requests.bit_length(),
        BLOCK_Q=block_q, LAST_ONLY=last_only, PLACES=_PLACES, OTHERS=_OTHERS, LINE_SIZE=LINE, num_warps=4,
    )  # fmt: skip
    return work


@triton.jit
def _block_at(
    place, rows_ptr, seq_lens_ptr, query_start_ptr, num_requests, num_places, search_steps,
    BLOCK_Q: tl.constexpr, LAST_ONLY: tl.constexpr,
):  # fmt: skip
    """→ request, first token, its position, tokens, length; keys seen + 1, 0 for a place without a block.

    Request b has the places from (query_start[b] - query_start[0]) // BLOCK_Q + b on, as many as it has blocks or one
    more: the number of places is known before the lengths are.
    """
    first_start = tl.load(query_start_ptr)
    request = place * 0
    for step in range(search_steps):
        candidate = request + (1 << (search_steps - 1 - step))
        start = tl.load(query_start_ptr + candidate, mask=candidate < num_requests, other=0)
        before = (start - first_start) // BLOCK_Q + candidate <= place
        request = tl.where((candidate < num_requests) & before, candidate, request)
    inside = (place < num_places) & (request < num_requests)
    start = tl.load(query_start_ptr + request, mask=inside, other=0)
    end = tl.load(query_start_ptr + request + 1, mask=inside, other=0)
    token = start + (place - (start - first_start) // BLOCK_Q - request) * BLOCK_Q
    num_tokens = tl.minimum(end - token, BLOCK_Q)
    seq_len = tl.load(seq_lens_ptr + request, mask=inside, other=0)
    position = seq_len - (end - token)
    exists = inside & (num_tokens > 0)
    if LAST_ONLY:
        exists = exists & (token + BLOCK_Q >= end)
    num_keys = tl.where(exists, tl.maximum(position + num_tokens, 0) + 1, 0)
    return request, token, position, num_tokens, seq_len, num_keys


@triton.jit(
    do_not_specialize=["num_requests", "num_places", "search_steps"],
    do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr", "query_start_ptr"],
)
def _prefill_work_kernel(
    work_ptr, rows_ptr, seq_lens_ptr, query_start_ptr, num_requests, num_places, search_steps,
    BLOCK_Q: tl.constexpr, LAST_ONLY: tl.constexpr, PLACES: tl.constexpr, OTHERS: tl.constexpr, LINE_SIZE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    request, token, position, num_tokens, seq_len, num_keys = _block_at(
        place, rows_ptr, seq_lens_ptr, query_start_ptr, num_requests, num_places, search_steps, BLOCK_Q, LAST_ONLY
    )
    # A block's line is the number of blocks before it: one variant for any number of them, where a sort needs many.
    line = place * 0
    count = num_requests * 0
    for first in range(0, num_places, OTHERS):
        other = first + tl.arange(0, OTHERS)
        _, _, _, _, _, other_keys = _block_at(
            other, rows_ptr, seq_lens_ptr, query_start_ptr, num_requests, num_places, search_steps, BLOCK_Q, LAST_ONLY
        )
        ahead = (other_keys[None, :] > num_keys[:, None]) | (
            (other_keys[None, :] == num_keys[:, None]) & (other[None, :] < place[:, None])
        )
        line += tl.sum(ahead.to(tl.int32), 1)
        count += tl.sum((other_keys > 0).to(tl.int32), 0)
    exists = num_keys > 0
    row = tl.load(rows_ptr + request, mask=exists, other=0)
    line_ptr = work_ptr + (1 + line) * LINE_SIZE
    tl.store(line_ptr, row, mask=exists)
    tl.store(line_ptr + 1, token, mask=exists)
    tl.store(line_ptr + 2, position, mask=exists)
    tl.store(line_ptr + 3, num_tokens, mask=exists)
    tl.store(line_ptr + 4, seq_len, mask=exists)
    if tl.program_id(0) == 0:
        tl.store(work_ptr, count)
        tl.store(work_ptr + 1, 0)  # items taken
        tl.store(work_ptr + 2, 0)  # programs that have ended
