"""Decode attention over the paged KV cache: split-KV ("flash decoding") in Triton.

Every request brings the same small number of query tokens, so the time goes into reading its keys and values once. The
query heads that share a KV head, times the query tokens, are packed into one matrix tile; long contexts are cut into
splits that run side by side, and a second kernel merges their results.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from ..launch.tiles import fits, tile_table
from .attention_decode_fp8 import decode_fp8_kernel
from .attention_parts import (
    LOG2E,
    LOWEST,
    DecodeWorkspace,
    PagedCache,
    Scoring,
    UniformBatch,
    choose_splits,
    first_seen,
    processors,
    soft_cap_scores,
    split_size_of,
    visible_keys,
)
from .kv_fp8 import TOKEN_SCALES, packs, scale_kind, tl_code

LATENT_SHARE = 2  # a program that loads keys in two tiles takes as much of an SM as so many others
MERGE_COLUMNS = 16  # of a value that one program merges: many small programs have all their loads in flight at once


@triton.jit(
    do_not_specialize=["min_split_tokens", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "seq_lens_ptr", "sinks_ptr"],
)
def _decode_kernel(
    out_ptr, partial_out_ptr, partial_lse_ptr,
    query_ptr, key_ptr, value_ptr, table_ptr, rows_ptr, seq_lens_ptr, sinks_ptr,
    scale, min_split_tokens, stride_table,
    stride_query_token, stride_query_head, stride_key_block, stride_key_slot, stride_key_head,
    stride_value_block, stride_value_slot, stride_value_head, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LEN: tl.constexpr, PAGE: tl.constexpr,
    KEY_SIZE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SAME_STRIDES: tl.constexpr,
    SPLIT: tl.constexpr, ROW_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    # KV heads are the fastest axis: the programs that run together read whole pages, not every eighth row. Splits are
    # the slowest, so the surplus ones of short requests exit in the shadow of real work.
    kv_head = tl.program_id(0) // ROW_BLOCKS
    request = tl.program_id(1)
    split = tl.program_id(2)

    # Lengths and tables are those of the whole step: no kernel near this one writes them (pdl.py has the rule).
    table_row = tl.load(rows_ptr + request)  # in flight together with the length
    seq_len = tl.load(seq_lens_ptr + request)
    table_row_ptr = table_ptr + table_row.to(tl.int64) * stride_table
    first_key, num_keys = visible_keys(seq_len, QUERY_LEN, WINDOW)
    start_key = first_key
    end_key = seq_len
    if SPLIT:
        split_size = split_size_of(num_keys, tl.num_programs(2), min_split_tokens, BLOCK_N)
        start_key = first_key + split * split_size
        end_key = tl.minimum(start_key + split_size, seq_len)
    lane = tl.arange(0, BLOCK_N)
    last_key = tl.maximum(end_key - 1, 0)
    next_block = tl.load(table_row_ptr + tl.minimum(start_key + lane, last_key).to(tl.uint32) // PAGE)
    if PDL and WAIT:
        gdc_wait()  # before the surplus splits exit as well
    # Surplus splits, and padding rows (seq_len 0), which must not write either: where prompts are packed behind the
    # decodes of a step, the rows of the result that padding would write are a prompt's first tokens.
    if start_key >= seq_len:
        return

    # Row r of the tile is query token r // GROUP, head r % GROUP of this KV head's group.
    row = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < GROUP * QUERY_LEN
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = seq_len - QUERY_LEN + token
    key_column = tl.arange(0, KEY_PAD)
    value_column = tl.arange(0, VALUE_PAD)
    token_index = request.to(tl.int64) * QUERY_LEN + token
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

    exp_scale = scale * LOG2E
    if SOFT_CAP > 0:
        exp_scale = LOG2E
    running_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    if HAS_SINKS:
        # The sink is one more logit without a value; it must be counted once, so split 0 takes it.
        sink = tl.load(sinks_ptr + head, mask=row_exists & (split == 0), other=float("-inf")).to(tl.float32) * LOG2E
        running_max = tl.maximum(running_max, sink)
    # One sum a lane, added up after the loop: warps share the rows, and every sum across them costs a barrier.
    lane_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)

    key_ptr += kv_head.to(tl.int64) * stride_key_head
    value_ptr += kv_head.to(tl.int64) * stride_value_head
    # One loop with masks rather than a bare one and an edge tile: the masks touch 16 rows and hide behind the loads,
    # whereas a second loop would drain the load pipeline once more. Lanes past the end re-read the last key, so memory
    # that was never written (NaN, perhaps) is never read.
    for tile_start in tl.range(start_key, end_key, BLOCK_N):
        key_position = tile_start + lane
        slot = tl.minimum(key_position, last_key).to(tl.uint32) % PAGE
        block = next_block.to(tl.int64)
        next_block = tl.load(table_row_ptr + tl.minimum(key_position + BLOCK_N, last_key).to(tl.uint32) // PAGE)

        key_offset = block * stride_key_block + slot * stride_key_slot
        value_offset = key_offset
        if not SAME_STRIDES:
            value_offset = block * stride_value_block + slot * stride_value_slot

        key_ptrs = key_ptr + key_offset[:, None] + key_column[None, :]
        if KEY_SIZE == KEY_PAD:
            key = tl.load(key_ptrs)
        else:
            key = tl.load(key_ptrs, mask=(key_column < KEY_SIZE)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if TAIL > 0:
            key_tail = tl.load(
                key_ptr + key_offset[:, None] + tail_column[None, :],
                mask=(tail_column < KEY_SIZE + TAIL)[None, :],
                other=0.0,
            )
            scores = tl.dot(query_tail, tl.trans(key_tail.to(query.dtype)), scores, input_precision="ieee")
        if SOFT_CAP > 0:
            scores = soft_cap_scores(scores * scale, SOFT_CAP)
        visible = (key_position < end_key)[None, :]
        if QUERY_LEN > 1:
            visible = visible & (key_position[None, :] <= position[:, None])
            if WINDOW != 0:
                visible = visible & (key_position[None, :] >= first_seen(position, WINDOW)[:, None])
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, 1) * exp_scale)
        decay = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores * exp_scale - new_max[:, None])
        lane_sums = lane_sums * decay[:, None] + weights
        running_max = new_max

        if TAIL > 0:
            value = key
        else:
            value_ptrs = value_ptr + value_offset[:, None] + value_column[None, :]
            if VALUE_SIZE == VALUE_PAD:
                value = tl.load(value_ptrs)
            else:
                value = tl.load(value_ptrs, mask=(value_column < VALUE_SIZE)[None, :], other=0.0)
        acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc * decay[:, None], input_precision="ieee")

    running_sum = tl.sum(lane_sums, 1)
    if HAS_SINKS:
        running_sum += tl.exp2(sink - running_max)
    running_sum = tl.where(running_sum > 0, running_sum, 1.0)  # rows that see nothing: acc is 0, and so is the result
    result = acc / running_sum[:, None]
    store_mask = row_exists[:, None] & (value_column < VALUE_SIZE)[None, :]
    out_ptrs = out_ptr + (token_index * stride_out_token + head * stride_out_head)[:, None] + value_column[None, :]
    if SPLIT:
        if split_size < num_keys:
            # Base-2 log-sum-exp; a row that sees nothing in this split has LOWEST and thereby weight 0 in the merge.
            lse = running_max + tl.log2(running_sum)
            partial = (token_index * NUM_HEADS + head) * tl.num_programs(2) + split
            tl.store(partial_lse_ptr + partial, lse, mask=row_exists)
            partial_ptrs = partial_out_ptr + (partial * VALUE_SIZE)[:, None] + value_column[None, :]
            tl.store(partial_ptrs, result, mask=store_mask)
        else:
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=store_mask)
    else:
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=store_mask)


@triton.jit(do_not_specialize=["min_split_tokens", "num_splits"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _merge_kernel(
    out_ptr, partial_out_ptr, partial_lse_ptr, seq_lens_ptr,
    min_split_tokens, num_splits, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, QUERY_LEN: tl.constexpr, VALUE_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + token // QUERY_LEN)  # of the whole step, as above
    if PDL:
        gdc_wait()
    _, num_keys = visible_keys(seq_len, QUERY_LEN, WINDOW)
    split_size = split_size_of(num_keys, num_splits, min_split_tokens, BLOCK_N)
    if split_size >= num_keys:  # a single split: the decode kernel has written the result itself
        return

    split = tl.arange(0, SPLITS_PAD)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    split_ran = split * split_size < num_keys
    partial = (token.to(tl.int64) * NUM_HEADS + head) * num_splits + split
    lse = tl.load(partial_lse_ptr + partial, mask=split_ran, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    result = tl.load(
        partial_out_ptr + (partial * VALUE_SIZE)[:, None] + column[None, :],
        mask=split_ran[:, None] & (column < VALUE_SIZE)[None, :],
        other=0.0,
    )
    result = tl.sum(result * weights[:, None], 0) / tl.sum(weights, 0)
    out_ptrs = out_ptr + token.to(tl.int64) * stride_out_token + head * stride_out_head + column
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=column < VALUE_SIZE)


@dataclass(frozen=True)
class DecodeTile:
    """block_n: keys per step; warps, stages: Triton's num_warps and num_stages.

    The shared memory of the stages is also what limits the programs on an SM. Launched while the kernel before still
    runs, they go where there is room, as many as fit on one SM while another gets none; so it is best when no more fit
    than choose_splits makes for each (64 requests of 4k: 247 us with 4 on an SM, 280 with 6).
    """

    block_n: int
    warps: int
    stages: int


def tile_size(head_size: int) -> int:
    """Under which head size tables of tiles have this one: latent attention's, of two tiles, is the largest."""
    return min(max(triton.next_power_of_2(head_size), 64), 512) if head_size <= 512 else 576


@lru_cache(maxsize=4096)
def decode_tile(dtype: torch.dtype, head_size: int, num_requests: int) -> DecodeTile:
    """The tile for this dtype of the cache and the larger of key and value size."""
    wanted = dtype.itemsize, tile_size(head_size)
    rows = (row for row in tile_table("decode") if (row["element_bytes"], row["head_size"]) == wanted)
    row = next(row for row in rows if fits(row["max_requests"], num_requests))
    return DecodeTile(row["block_n"], row["warps"], row["stages"])


def key_tail(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Of keys whose first elements are the values: how many more they have. 0: values are loaded by themselves.

    A key of latent attention, 512 + 64 elements, is loaded as two tiles, of which the first is the value as well. As
    one tile it would be one of 1024, and the value another one.
    """
    size, alike = values.shape[3], keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
    return keys.shape[3] - size if alike and size >= 16 and size & (size - 1) == 0 else 0


def decode_attention_triton(
    query: torch.Tensor,
    cache: PagedCache,
    batch: UniformBatch,
    scoring: Scoring,
    *,
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
    beside: bool = False,
    block_n: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_splits: int | None = None,
    min_split_tokens: int | None = None,
) -> torch.Tensor:
    """`decode_attention` (see attention.py) on Triton; the arguments after `beside` override the tile and the splits.

    beside: begins when the programs of the kernel before it have, without waiting for their end (attention_beside.py).
    """
    keys, values, table = cache.keys, cache.values, cache.block_table
    rows, seq_lens, query_len = batch.rows, batch.seq_lens, batch.query_len
    window, sinks = scoring.reach, scoring.sinks
    num_tokens, num_heads, key_size = query.shape
    _, page, num_kv_heads, value_size = values.shape
    num_requests = rows.shape[0]
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value_size)
    if num_requests == 0:
        return out

    tile = decode_tile(keys.dtype, max(key_size, value_size), num_requests)
    block_n = block_n or tile.block_n
    group, tail = num_heads // num_kv_heads, key_tail(keys, values)
    tile_rows = group * query_len
    block_m = min(max(triton.next_power_of_2(tile_rows), 16), 64)
    row_blocks = triton.cdiv(tile_rows, block_m)
    # Of latent attention's programs one or two fit on an SM, where choose_splits counts on four and more.
    shares = num_kv_heads * row_blocks * LATENT_SHARE if tail else num_kv_heads
    default_splits, default_min_tokens = choose_splits(
        num_requests, shares, processors(query.device), table.shape[1] * page
    )
    num_splits = num_splits or default_splits
    min_split_tokens = min_split_tokens or default_min_tokens
    num_partials = num_requests * query_len * num_heads * num_splits if num_splits > 1 else 0
    if workspace is None:
        workspace = DecodeWorkspace.allocate(num_partials, value_size, query.device)
    if workspace.partial_lse.numel() < num_partials or workspace.partial_out.numel() < num_partials * value_size:
        raise ValueError(
            f"decode workspace holds {workspace.partial_lse.numel()} partial results, {num_requests} requests x "
            f"{query_len} tokens x {num_heads} heads x {num_splits} splits need {num_partials}: "
            "create it with larger max_rows, max_query_len or heads"
        )

    constants = dict(
        NUM_HEADS=num_heads, GROUP=group, QUERY_LEN=query_len, PAGE=page,
        KEY_SIZE=key_size - tail, KEY_PAD=max(triton.next_power_of_2(key_size - tail), 16),
        VALUE_SIZE=value_size, VALUE_PAD=max(triton.next_power_of_2(value_size), 16),
        WINDOW=window, SOFT_CAP=float(scoring.soft_cap), HAS_SINKS=sinks is not None,
        SPLIT=num_splits > 1, ROW_BLOCKS=row_blocks, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=num_warps or tile.warps, num_stages=num_stages or tile.stages, WAIT=not beside, **pdl_options(query),
    )  # fmt: skip
    grid = num_kv_heads * row_blocks, num_requests, num_splits
    key_scales, value_scales = cache.key_scales, cache.value_scales
    if key_scales is None or value_scales is None:
        _decode_kernel[grid](
            out, workspace.partial_out, workspace.partial_lse,
            query, keys, values, table, rows, seq_lens, query if sinks is None else sinks,
            float(scoring.scale), min_split_tokens, table.stride(0),
            *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2],
            TAIL=tail, TAIL_PAD=max(triton.next_power_of_2(tail), 16), SAME_STRIDES=keys.stride() == values.stride(),
            **constants,
        )  # fmt: skip
    else:
        words = keys.view(torch.int16), values.view(torch.int16)
        decode_fp8_kernel[grid](
            out, workspace.partial_out, workspace.partial_lse,
            query, *words, key_scales, value_scales, table, rows, seq_lens, query if sinks is None else sinks,
            float(scoring.scale), min_split_tokens, table.stride(0),
            *query.stride()[:2], *words[0].stride()[:3], *words[1].stride()[:3],
            *key_scales.stride(), *value_scales.stride(), *out.stride()[:2],
            CODE=tl_code(keys.dtype), PACKED=query.dtype == torch.bfloat16 and packs(query.device),
            TOKEN_SCALES=scale_kind(key_scales) == TOKEN_SCALES, **constants,
        )  # fmt: skip
    if num_splits > 1:
        _merge_kernel[(num_requests * query_len, num_heads, triton.cdiv(value_size, MERGE_COLUMNS))](
            out, workspace.partial_out, workspace.partial_lse, seq_lens,
            min_split_tokens, num_splits, *out.stride()[:2],
            NUM_HEADS=num_heads, QUERY_LEN=query_len, VALUE_SIZE=value_size, COLUMNS=MERGE_COLUMNS,
            WINDOW=window, BLOCK_N=block_n, SPLITS_PAD=triton.next_power_of_2(num_splits), num_warps=1,
            **pdl_options(query),
        )  # fmt: skip
    return out
