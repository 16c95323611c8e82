"""Prefill attention over the paged KV cache in Triton: causal, ragged, large row tiles."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..launch.tiles import fits, tile_table
from .attention_decode import key_tail, tile_size
from .attention_parts import LIFT, LOG2E, LOWEST, PagedCache, RaggedBatch, Scoring, first_seen, soft_cap_scores
from .kv_fp8 import as_numbers, scale_kind


@triton.jit(
    do_not_specialize=["num_requests", "num_kv_heads", "stride_table"],
    do_not_specialize_on_alignment=[
        "table_ptr", "rows_ptr", "seq_lens_ptr", "query_start_ptr", "sinks_ptr", "last_seen_ptr",
    ],
)  # fmt: skip
def _prefill_kernel(
    out_ptr, query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    table_ptr, rows_ptr, seq_lens_ptr, query_start_ptr, sinks_ptr, last_seen_ptr, scale, num_requests, num_kv_heads,
    stride_table,
    stride_query_token, stride_query_head, stride_key_block, stride_key_slot, stride_key_head,
    stride_value_block, stride_value_slot, stride_value_head,
    stride_key_scale_block, stride_key_scale_slot, stride_key_scale_head,
    stride_value_scale_block, stride_value_scale_slot, stride_value_scale_head, stride_out_token, stride_out_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, REQUESTS_PAD: tl.constexpr,
    KEY_SIZE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PAD: tl.constexpr, SHARED: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LAST_SEEN: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """NUM_KV_HEADS: 0 where num_kv_heads says it, for one variant of any number of heads.
    TAIL: elements of a key behind the KEY_SIZE ones that are loaded as one tile. SHARED: these are the value, too.
    SCALES: of kv_fp8.py. They multiply scores and weights, or where all tokens have the same, all scores and the
    result."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Heads are the fastest axis: those of the longest blocks all start first.
    if NUM_KV_HEADS > 0:
        num_kv_heads = NUM_KV_HEADS
    kv_head = tl.program_id(0) % num_kv_heads
    place = tl.program_id(0) // num_kv_heads
    # Request b has the places from query_start[b] // BLOCK_Q + b on, as many as it has blocks or one more. So the grid
    # follows the number of tokens, not the longest request times the number of requests: programs without work cost
    # as much as they do in a launch that has little else.
    index = tl.arange(0, REQUESTS_PAD)
    starts = tl.load(query_start_ptr + index, mask=index < num_requests, other=0)
    first_start = tl.load(query_start_ptr)
    first_places = (starts - first_start) // BLOCK_Q + index
    request = tl.sum(((index < num_requests) & (first_places <= place)).to(tl.int32), 0) - 1
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    # A request's last block sees the most keys, so it starts first: causal work then ends in small pieces.
    query_block = tl.cdiv(query_len, BLOCK_Q) - 1 - (place - (query_start - first_start) // BLOCK_Q - request)
    if query_block < 0:
        return

    # Row r of the tile is query token r // GROUP of the block, head r % GROUP of this KV head's group.
    row = tl.arange(0, BLOCK_M)
    first_token = query_block * BLOCK_Q
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_exists = (row < BLOCK_Q * GROUP) & (token < query_len)
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    position = first_position + row // GROUP
    token_index = (query_start + token).to(tl.int64)
    newest = position  # of the keys that a row sees
    if HAS_LAST_SEEN:
        newest = tl.load(last_seen_ptr + token_index, mask=row_exists, other=0)
        last_position = tl.max(newest, 0)
    key_column = tl.arange(0, KEY_PAD)
    value_column = tl.arange(0, VALUE_PAD)
    query = tl.load(
        query_ptr + (token_index * stride_query_token + head * stride_query_head)[:, None] + key_column[None, :],
        mask=row_exists[:, None] & (key_column < KEY_SIZE)[None, :],
        other=0.0,
    )
    if TAIL > 0:
        tail_column = KEY_SIZE + tl.arange(0, TAIL_PAD)
        query_tail = tl.load(
            query_ptr + (token_index * stride_query_token + head * stride_query_head)[:, None] + tail_column[None, :],
            mask=row_exists[:, None] & (tail_column < KEY_SIZE + TAIL)[None, :],
            other=0.0,
        )

    running_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=row_exists, other=0.0).to(tl.float32) * LOG2E
        running_max = tl.maximum(running_max, sink)
        running_sum = tl.exp2(sink - running_max)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)

    table_row_ptr = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * stride_table
    key_ptr += kv_head.to(tl.int64) * stride_key_head
    value_ptr += kv_head.to(tl.int64) * stride_value_head
    if SCALES > 0:
        key_scale_ptr += kv_head.to(tl.int64) * stride_key_scale_head
        value_scale_ptr += kv_head.to(tl.int64) * stride_value_scale_head
        if SCALES == 1:
            scale *= tl.load(key_scale_ptr)
    start_key = first_position * 0
    if WINDOW != 0:
        start_key = tl.maximum(first_seen(first_position, WINDOW), 0)
    exp_scale = scale * LOG2E
    if SOFT_CAP > 0:
        exp_scale = LOG2E

    # The page numbers are fetched one tile ahead, so that the loads of keys and values never wait for them and can be
    # pipelined. Lanes past the last key re-read it: memory that was never written (NaN, perhaps) is never read.
    lane = tl.arange(0, BLOCK_N)
    next_block = tl.load(table_row_ptr + tl.minimum(start_key + lane, last_position).to(tl.uint32) // PAGE)
    for tile_start in tl.range(start_key, last_position + 1, BLOCK_N):
        key_position = tile_start + lane
        slot = tl.minimum(key_position, last_position).to(tl.uint32) % PAGE
        block = next_block.to(tl.int64)
        next_block = tl.load(table_row_ptr + tl.minimum(key_position + BLOCK_N, last_position).to(tl.uint32) // PAGE)

        key_offset = block * stride_key_block + slot * stride_key_slot
        value_offset = key_offset
        if not SAME_STRIDES:
            value_offset = block * stride_value_block + slot * stride_value_slot

        key_ptrs = key_ptr + key_offset[:, None] + key_column[None, :]
        if KEY_SIZE == KEY_PAD:
            key = tl.load(key_ptrs)
        else:
            key = tl.load(key_ptrs, mask=(key_column < KEY_SIZE)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(as_numbers(key, query.dtype)), input_precision="ieee")
        if TAIL > 0:
            key_tail = tl.load(
                key_ptr + key_offset[:, None] + tail_column[None, :],
                mask=(tail_column < KEY_SIZE + TAIL)[None, :],
                other=0.0,
            )
            scores = tl.dot(query_tail, tl.trans(as_numbers(key_tail, query.dtype)), scores, input_precision="ieee")
        if SCALES == 2:
            scores *= tl.load(key_scale_ptr + block * stride_key_scale_block + slot * stride_key_scale_slot)[None, :]
        if SOFT_CAP > 0:
            scores = soft_cap_scores(scores * scale, SOFT_CAP)
        # Most tiles lie before the first row's position (and after the last row's window limit): every row sees all of
        # them. A branch inside the one loop keeps the load pipeline full where a second loop would drain it.
        edge = tile_start + BLOCK_N > first_position + 1
        if WINDOW != 0:
            edge = edge | (tile_start < first_seen(last_position, WINDOW))
        if edge:
            visible = key_position[None, :] <= newest[:, None]
            if WINDOW != 0:
                visible = visible & (key_position[None, :] >= first_seen(position, WINDOW)[:, None])
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, 1) * exp_scale)
        decay = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores * exp_scale - new_max[:, None])
        running_sum = running_sum * decay + tl.sum(weights, 1)
        running_max = new_max
        if SCALES == 2:
            value_scale_ptrs = value_scale_ptr + block * stride_value_scale_block + slot * stride_value_scale_slot
            weights *= (tl.load(value_scale_ptrs) * LIFT)[None, :]

        if SHARED:
            value = key
        else:
            value_ptrs = value_ptr + value_offset[:, None] + value_column[None, :]
            if VALUE_SIZE == VALUE_PAD:
                value = tl.load(value_ptrs)
            else:
                value = tl.load(value_ptrs, mask=(value_column < VALUE_SIZE)[None, :], other=0.0)
        acc = tl.dot(
            weights.to(query.dtype), as_numbers(value, query.dtype), acc * decay[:, None], input_precision="ieee"
        )

    result = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    if SCALES == 1:
        result *= tl.load(value_scale_ptr)
    if SCALES == 2:
        result *= 1.0 / LIFT
    out_ptrs = out_ptr + (token_index * stride_out_token + head * stride_out_head)[:, None] + value_column[None, :]
    store_mask = row_exists[:, None] & (value_column < VALUE_SIZE)[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=store_mask)


@dataclass(frozen=True)
class PrefillTile:
    """block_m: rows (query tokens x grouped heads); block_n: keys per step; warps, stages: Triton's options."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@lru_cache
def _prefill_tiles(element_bytes: int, head_size: int) -> tuple[tuple[int | None, PrefillTile], ...]:
    return tuple(
        (row["max_rows"], PrefillTile(row["block_m"], row["block_n"], row["warps"], row["stages"]))
        for row in tile_table("prefill")
        if (row["element_bytes"], row["head_size"]) == (element_bytes, head_size)
    )


def prefill_tile(dtype: torch.dtype, head_size: int, num_rows: int) -> PrefillTile:
    """The tile for this dtype, the larger of key and value size, and max_query_len x grouped heads rows.

    Small tiles fill the card with prompts of a thousand tokens, large ones are faster when there are more.
    """
    tiles = _prefill_tiles(dtype.itemsize, tile_size(head_size))
    return next(tile for max_rows, tile in tiles if fits(max_rows, num_rows))


def prefill_attention_triton(
    query: torch.Tensor,
    cache: PagedCache,
    batch: RaggedBatch,
    scoring: Scoring,
    *,
    out: torch.Tensor | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    any_heads: bool = False,
) -> torch.Tensor:
    """`prefill_attention` (see attention.py) on Triton; the arguments after `out` override the tile.

    any_heads: with a kernel that is the same for all numbers of KV heads.
    """
    keys, values, table = cache.keys, cache.values, cache.block_table
    sinks, key_scales, value_scales = scoring.sinks, cache.key_scales, cache.value_scales
    num_tokens, num_heads, key_size = query.shape
    _, page, num_kv_heads, value_size = values.shape
    num_requests = batch.rows.shape[0]
    last_seen = batch.last_seen
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value_size)
    if num_requests == 0 or batch.max_query_len == 0:
        return out

    group, tail = num_heads // num_kv_heads, key_tail(keys, values)
    shared = tail > 0
    if key_size > value_size >= 16 and value_size & (value_size - 1) == 0:
        tail = key_size - value_size  # as latent attention's expanded keys, 128 + 64: as one tile they would take 256
    tile = prefill_tile(query.dtype, max(key_size, value_size), batch.max_query_len * group)
    block_m = block_m or tile.block_m
    if num_kv_heads == 1 and group > block_m and group % block_m == 0:
        # More heads than a tile has rows: one key head is as good as several at the same place.
        num_kv_heads, group = group // block_m, block_m
        keys, values = (x.expand(-1, -1, num_kv_heads, -1) for x in (keys, values))
        if key_scales is not None and value_scales is not None:
            key_scales, value_scales = (x.expand(-1, -1, num_kv_heads) for x in (key_scales, value_scales))
    block_m = max(block_m, triton.next_power_of_2(group))
    num_places = num_tokens // (block_m // group) + num_requests
    _prefill_kernel[(num_places * num_kv_heads,)](
        out, query, keys, values, query if key_scales is None else key_scales,
        query if value_scales is None else value_scales, table, batch.rows, batch.seq_lens, batch.query_start,
        query if sinks is None else sinks, batch.rows if last_seen is None else last_seen, float(scoring.scale),
        num_requests, num_kv_heads,
        table.stride(0),
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        *((0, 0, 0) if value_scales is None else value_scales.stride()), *out.stride()[:2],
        NUM_KV_HEADS=0 if any_heads else num_kv_heads, GROUP=group, PAGE=page,
        REQUESTS_PAD=16 if num_requests <= 16 else max(1024, triton.next_power_of_2(num_requests)),
        KEY_SIZE=key_size - tail, KEY_PAD=max(triton.next_power_of_2(key_size - tail), 16),
        VALUE_SIZE=value_size, VALUE_PAD=max(triton.next_power_of_2(value_size), 16),
        TAIL=tail, TAIL_PAD=max(triton.next_power_of_2(tail), 16), SHARED=shared,
        WINDOW=scoring.reach, SOFT_CAP=float(scoring.soft_cap), HAS_SINKS=sinks is not None,
        HAS_LAST_SEEN=last_seen is not None,
        SAME_STRIDES=keys.stride() == values.stride(),
        SCALES=scale_kind(key_scales), BLOCK_M=block_m, BLOCK_N=block_n or tile.block_n,
        num_warps=num_warps or tile.warps, num_stages=num_stages or tile.stages,
    )  # fmt: skip
    return out
