"""A step's inputs, gathered on the device from the stable request rows, and the sampled tokens written back to them.

The tables, all int32 on one device: a History of requests' prompts and output (history.py; L is its max_len),
num_computed [R + 1] (tokens whose keys and values are in the cache), block_table [R + 1, max_blocks]. Row R is the
dummy that padding points at. A step names its requests by rows int32 [B] and query_start int32 [B + 1], non-decreasing:
request i computes query_start[i + 1] - query_start[i] tokens, none if it is padding. Launch grids depend on B alone
(CUDA graphs).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ..attention.history import History, page_places

_BLOCK = 1024


def scatter_rows(
    table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor
) -> None:
    """Write i puts values[offsets[i] : offsets[i + 1]] into table[rows[i]], from column starts[i] on.

    table int32 [R + 1, L]; rows and starts int32 [n], offsets int32 [n + 1] and non-decreasing, values int32 [at least
    offsets[n]], all on table's device. Writes must stay inside their row. Which of two writes to one cell wins is not
    defined.
    """
    (scatter_rows_triton if table.is_cuda else scatter_rows_torch)(table, rows, starts, offsets, values)


def build_inputs(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor,
) -> None:  # fmt: skip
    """Fills input_ids and positions int32 [T] and seq_lens int32 [B], every element.

    Token j of request i is at position num_computed[rows[i]] + j and its id comes from the history (0 at positions from
    L on); seq_lens[i] is the length with this step's tokens, 0 for padding rows. Tokens from query_start[B] on get id
    and position 0. What comes from a ring goes to its page as well: all of the step's tokens are in pages then.
    """
    (build_inputs_triton if history.pages.is_cuda else build_inputs_torch)(
        history, num_computed, rows, query_start, input_ids, positions, seq_lens
    )


def build_slots(
    block_table: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor,
    slots: torch.Tensor, page_size: int,
) -> None:  # fmt: skip
    """Fills slots int32 [T]: block_table[row, position // page_size] · page_size + position % page_size.

    positions int32 [T] from build_inputs. Padding tokens, and positions beyond the table's width, get -1: not written.
    """
    (build_slots_triton if block_table.is_cuda else build_slots_torch)(
        block_table, rows, query_start, positions, slots, page_size
    )


def commit_tokens(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor,
    sampled: torch.Tensor, sample_index: torch.Tensor,
) -> None:  # fmt: skip
    """Ends a step: num_computed[rows[i]] += request i's tokens, then its sample becomes the next token of its row,
    in its ring.

    sampled int32 [S]; sample_index int32 [B], request i's place in sampled or -1 for none. A sample whose position is L
    or more is dropped. Rows of no tokens change nothing; the other rows must differ from each other.
    """
    (commit_tokens_triton if history.pages.is_cuda else commit_tokens_torch)(
        history, num_computed, rows, query_start, sampled, sample_index
    )


# ---- torch: on the CPU, in numpy, whose calls take a fraction of the time of torch's where numbers are few ----------


def scatter_rows_torch(
    table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor
) -> None:
    write, column = _expand(offsets.numpy(), starts.numpy())
    begin = int(offsets[0])
    table.numpy()[rows.numpy()[write], column] = values.numpy()[begin : begin + len(write)]


def build_inputs_torch(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor,
) -> None:  # fmt: skip
    row, start = rows.numpy(), query_start.numpy()
    if len(row) == len(input_ids) == start[-1] == 1:  # the single-stream decode step
        only_row, only_position, only_id = int(row[0]), int(num_computed.numpy()[row[0]]), 0
        if only_position < history.max_len:
            entry, offset = divmod(only_position, history.page)
            only_page = history.pages.numpy()[history.table.numpy()[only_row, entry]]
            if only_position >= history.given.numpy()[only_row]:
                only_page[offset] = history.recent.numpy()[only_row, only_position % history.ring]
            only_id = int(only_page[offset])
        input_ids.numpy()[0], positions.numpy()[0], seq_lens.numpy()[0] = only_id, only_position, only_position + 1
        return
    computed, lengths = num_computed.numpy()[row], np.diff(start)
    np.multiply(computed + lengths, lengths > 0, out=seq_lens.numpy())
    request, position = _expand(start, computed)
    row, inside = row[request], position < history.max_len
    page, offset = np.divmod(np.minimum(position, history.max_len - 1), history.page)
    places = history.table.numpy()[row, page].astype(np.int64) * history.page + offset
    pages = history.pages.view(-1).numpy()
    ids = pages[places] * inside
    new = np.flatnonzero(inside & (position >= history.given.numpy()[row]))
    ids[new] = pages[places[new]] = history.recent.numpy()[row[new], position[new] % history.ring]
    _fill(input_ids, ids, 0)
    _fill(positions, position, 0)


def build_slots_torch(
    block_table: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor,
    slots: torch.Tensor, page_size: int,
) -> None:  # fmt: skip
    start, table = query_start.numpy(), block_table.numpy()
    if len(rows) == len(slots) == start[-1] == 1:
        entry, place = divmod(int(positions.numpy()[0]), page_size)
        slots.numpy()[0] = table[rows.numpy()[0], entry] * page_size + place if entry < table.shape[1] else -1
        return
    page, offset = np.divmod(positions.numpy()[: start[-1]], page_size)
    inside = page < table.shape[1]
    block = table[np.repeat(rows.numpy(), np.diff(start)), np.minimum(page, table.shape[1] - 1)]
    _fill(slots, np.where(inside, block * page_size + offset, -1), -1)


def commit_tokens_torch(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor,
    sampled: torch.Tensor, sample_index: torch.Tensor,
) -> None:  # fmt: skip
    start, computed = query_start.numpy(), num_computed.numpy()
    if len(rows) == 1:
        row, only_length, only_sample = rows.numpy()[0], int(start[1] - start[0]), sample_index.numpy()[0]
        computed[row] = only_position = int(computed[row]) + only_length
        if only_length and only_sample >= 0 and only_position < history.max_len:
            history.recent.numpy()[row, only_position % history.ring] = sampled.numpy()[only_sample]
        return
    lengths = np.diff(start)
    active = np.flatnonzero(lengths)
    row, sample = rows.numpy()[active], sample_index.numpy()[active]
    computed[row] = position = computed[row] + lengths[active]
    keep = np.flatnonzero((sample >= 0) & (position < history.max_len))
    history.recent.numpy()[row[keep], position[keep] % history.ring] = sampled.numpy()[sample[keep]]


def _expand(offsets: np.ndarray, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """→ of each element of the ragged runs that offsets cut: its run, and its place, which counts from the run's
    first."""
    run = np.repeat(np.arange(len(firsts)), np.diff(offsets))
    return run, np.arange(offsets[0], offsets[-1], dtype=np.int32) + (firsts - offsets[:-1])[run]


def _fill(out: torch.Tensor, values: np.ndarray, padding: int) -> None:
    array = out.numpy()
    array[: len(values)] = values
    array[len(values) :] = padding


def scatter_rows_triton(
    table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor
) -> None:
    num_writes = rows.shape[0]
    if num_writes:
        # Several programs share a write, so that one long prompt does not go through a single processor.
        sharers = min(16, triton.cdiv(max(1, values.shape[0]), _BLOCK))
        _scatter_rows_kernel[(num_writes, sharers)](
            table, rows, starts, offsets, values, table.stride(0), BLOCK=_BLOCK, num_warps=4
        )


def build_inputs_triton(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor,
) -> None:  # fmt: skip
    _build_inputs_kernel[(rows.shape[0] + 1,)](
        history.pages, history.table, history.recent, history.given, num_computed, rows, query_start, input_ids,
        positions, seq_lens, history.table.stride(0), history.given.stride(0), history.max_len, input_ids.shape[0],
        PAGE=history.page, RING=history.ring, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def build_slots_triton(
    block_table: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor,
    slots: torch.Tensor, page_size: int,
) -> None:  # fmt: skip
    _build_slots_kernel[(rows.shape[0] + 1,)](
        block_table, rows, query_start, positions, slots, block_table.stride(0), block_table.shape[1], slots.shape[0],
        PAGE=page_size, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def commit_tokens_triton(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor,
    sampled: torch.Tensor, sample_index: torch.Tensor,
) -> None:  # fmt: skip
    num_rows = rows.shape[0]
    if num_rows:
        _commit_tokens_kernel[(triton.cdiv(num_rows, 128),)](
            history.recent, num_computed, rows, query_start, sampled, sample_index,
            history.max_len, num_rows, RING=history.ring, BLOCK=128, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _scatter_rows_kernel(table_ptr, rows_ptr, starts_ptr, offsets_ptr, values_ptr, table_stride, BLOCK: tl.constexpr):
    write, sharer = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets_ptr + write), tl.load(offsets_ptr + write + 1)
    target = table_ptr + tl.load(rows_ptr + write).to(tl.int64) * table_stride + tl.load(starts_ptr + write)
    for first in range(begin + sharer * BLOCK, end, tl.num_programs(1) * BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(target + (index - begin), tl.load(values_ptr + index, mask=index < end), mask=index < end)


@triton.jit(do_not_specialize=["num_tokens"])
def _build_inputs_kernel(
    pages_ptr, table_ptr, recent_ptr, given_ptr, num_computed_ptr, rows_ptr, query_start_ptr, input_ids_ptr,
    positions_ptr, seq_lens_ptr, table_stride, given_stride, max_len, num_tokens,
    PAGE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    num_requests = tl.num_programs(0) - 1
    begin = tl.load(query_start_ptr + request)
    if request == num_requests:  # the last program fills the padding
        for first in range(begin, num_tokens, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(input_ids_ptr + token, 0, mask=token < num_tokens)
            tl.store(positions_ptr + token, 0, mask=token < num_tokens)
    else:
        end = tl.load(query_start_ptr + request + 1)
        row = tl.load(rows_ptr + request).to(tl.int64)
        computed = tl.load(num_computed_ptr + row)
        given = tl.load(given_ptr + row * given_stride)
        tl.store(seq_lens_ptr + request, tl.where(end > begin, computed + end - begin, 0))
        for first in range(begin, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            position = computed + token - begin
            inside = (token < end) & (position < max_len)
            page_ptr = pages_ptr + page_places(table_ptr + row * table_stride, position, inside, PAGE)
            is_new = inside & (position >= given)
            ids = tl.load(page_ptr, mask=inside & (position < given), other=0)
            ids += tl.load(recent_ptr + row * RING + position % RING, mask=is_new, other=0)  # one of both is 0
            tl.store(page_ptr, ids, mask=is_new)
            tl.store(input_ids_ptr + token, ids, mask=token < end)
            tl.store(positions_ptr + token, position, mask=token < end)


@triton.jit(do_not_specialize=["num_tokens"])
def _build_slots_kernel(
    block_table_ptr, rows_ptr, query_start_ptr, positions_ptr, slots_ptr, table_stride, max_blocks, num_tokens,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    num_requests = tl.num_programs(0) - 1
    begin = tl.load(query_start_ptr + request)
    if request == num_requests:
        for first in range(begin, num_tokens, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(slots_ptr + token, -1, mask=token < num_tokens)
    else:
        end = tl.load(query_start_ptr + request + 1)
        table = block_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
        for first in range(begin, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            position = tl.load(positions_ptr + token, mask=token < end, other=0)
            inside = (token < end) & (position // PAGE < max_blocks)
            block = tl.load(table + position // PAGE, mask=inside, other=0)
            tl.store(slots_ptr + token, tl.where(inside, block * PAGE + position % PAGE, -1), mask=token < end)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows_ptr", "query_start_ptr", "sample_index_ptr"]
)
def _commit_tokens_kernel(
    recent_ptr, num_computed_ptr, rows_ptr, query_start_ptr, sampled_ptr, sample_index_ptr,
    max_len, num_rows, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_rows
    row = tl.load(rows_ptr + request, mask=inside, other=0).to(tl.int64)
    begin = tl.load(query_start_ptr + request, mask=inside, other=0)
    length = tl.load(query_start_ptr + request + 1, mask=inside, other=0) - begin
    active = inside & (length > 0)
    position = tl.load(num_computed_ptr + row, mask=active, other=0) + length
    tl.store(num_computed_ptr + row, position, mask=active)
    index = tl.load(sample_index_ptr + request, mask=active, other=-1)
    keep = active & (index >= 0) & (position < max_len)
    token = tl.load(sampled_ptr + index, mask=keep, other=0)
    tl.store(recent_ptr + row * RING + position % RING, token, mask=keep)
