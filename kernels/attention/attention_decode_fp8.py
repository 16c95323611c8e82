"""Decode attention over a cache of 8-bit codes (kv_fp8.py): the kernel of attention_decode.py, which launches it, with
tiles of words of two codes.

A tile of keys is two: of the even and of the odd places of its heads, each of which meets those places of the query. A
tile of values is two as well, and so is what is summed up. Scales never meet a code: those of keys multiply scores,
those of values the weights, or the result where all tokens have the same. In that case bf16 multiplies values as fp16,
whose NaN stays what it is (kv_fp8.py): weights are 1 at most, and raised to where fp16 has enough smaller numbers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_parts import LIFT, LOG2E, LOWEST, first_seen, soft_cap_scores, split_size_of, visible_keys
from .kv_fp8 import unpack_values, unpack_words, value_unit


@triton.jit(
    do_not_specialize=["min_split_tokens", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "seq_lens_ptr", "sinks_ptr"],
)
def decode_fp8_kernel(
    out_ptr, partial_out_ptr, partial_lse_ptr,
    query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, rows_ptr, seq_lens_ptr, sinks_ptr,
    scale, min_split_tokens, stride_table,
    stride_query_token, stride_query_head, stride_key_block, stride_key_slot, stride_key_head,
    stride_value_block, stride_value_slot, stride_value_head,
    stride_key_scale_block, stride_key_scale_slot, stride_key_scale_head,
    stride_value_scale_block, stride_value_scale_slot, stride_value_scale_head,
    stride_out_token, stride_out_head,
    CODE: tl.constexpr, PACKED: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LEN: tl.constexpr, PAGE: tl.constexpr,
    KEY_SIZE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr, ROW_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """key_ptr and value_ptr: int16, with strides of words. Sizes are those of heads; the _PAD of a power of two."""
    HALVES: tl.constexpr = PACKED and not TOKEN_SCALES
    RAISED: tl.constexpr = 12.0 if HALVES else 0.0  # powers of two; the three that are left are for rounding
    if PDL:
        gdc_launch_dependents()
    # Programs, splits, the wait and who leaves early: as in attention_decode.py.
    kv_head = tl.program_id(0) // ROW_BLOCKS
    request = tl.program_id(1)
    split = tl.program_id(2)
    table_row = tl.load(rows_ptr + request)
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
        gdc_wait()
    if start_key >= seq_len:
        return

    row = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < GROUP * QUERY_LEN
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = seq_len - QUERY_LEN + token
    key_word = tl.arange(0, KEY_PAD // 2)
    value_word = tl.arange(0, VALUE_PAD // 2)
    token_index = request.to(tl.int64) * QUERY_LEN + token
    query_ptrs = query_ptr + (token_index * stride_query_token + head * stride_query_head)[:, None]
    query_ptrs += 2 * key_word[None, :]
    query_mask = row_exists[:, None] & (2 * key_word < KEY_SIZE)[None, :]
    query_even = tl.load(query_ptrs, mask=query_mask, other=0.0)
    query_odd = tl.load(query_ptrs + 1, mask=query_mask, other=0.0)

    key_ptr += kv_head.to(tl.int64) * stride_key_head
    value_ptr += kv_head.to(tl.int64) * stride_value_head
    key_scale_ptr += kv_head.to(tl.int64) * stride_key_scale_head
    value_scale_ptr += kv_head.to(tl.int64) * stride_value_scale_head
    if not TOKEN_SCALES:
        scale *= tl.load(key_scale_ptr)
    exp_scale = scale * LOG2E
    if SOFT_CAP > 0:
        exp_scale = LOG2E
    running_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=row_exists & (split == 0), other=float("-inf")).to(tl.float32) * LOG2E
        running_max = tl.maximum(running_max, sink)
    lane_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_even = tl.zeros([BLOCK_M, VALUE_PAD // 2], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, VALUE_PAD // 2], tl.float32)

    for tile_start in tl.range(start_key, end_key, BLOCK_N):
        key_position = tile_start + lane
        slot = tl.minimum(key_position, last_key).to(tl.uint32) % PAGE
        block = next_block.to(tl.int64)
        next_block = tl.load(table_row_ptr + tl.minimum(key_position + BLOCK_N, last_key).to(tl.uint32) // PAGE)

        key_ptrs = key_ptr + (block * stride_key_block + slot * stride_key_slot)[None, :] + key_word[:, None]
        if KEY_SIZE == KEY_PAD:
            keys = tl.load(key_ptrs)
        else:
            keys = tl.load(key_ptrs, mask=(2 * key_word < KEY_SIZE)[:, None], other=0)
        key_even, key_odd = unpack_words(keys, query_ptr.dtype.element_ty, CODE, PACKED)
        scores = tl.dot(query_even, key_even, input_precision="ieee")
        scores = tl.dot(query_odd, key_odd, scores, input_precision="ieee")
        if TOKEN_SCALES:
            scores *= tl.load(key_scale_ptr + block * stride_key_scale_block + slot * stride_key_scale_slot)[None, :]
        if SOFT_CAP > 0:
            scores = soft_cap_scores(scores * scale, SOFT_CAP)
        visible = (key_position < end_key)[None, :]
        if QUERY_LEN > 1:
            visible = visible & (key_position[None, :] <= position[:, None])
            if WINDOW != 0:
                visible = visible & (key_position[None, :] >= first_seen(position, WINDOW)[:, None])
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, 1) * exp_scale - RAISED)
        decay = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores * exp_scale - new_max[:, None])
        lane_sums = lane_sums * decay[:, None] + weights
        running_max = new_max
        if TOKEN_SCALES:
            value_scale_ptrs = value_scale_ptr + block * stride_value_scale_block + slot * stride_value_scale_slot
            weights *= (tl.load(value_scale_ptrs) * LIFT)[None, :]
        if HALVES:
            weights = weights.to(tl.float16)
        else:
            weights = weights.to(query_even.dtype)

        value_ptrs = value_ptr + (block * stride_value_block + slot * stride_value_slot)[:, None] + value_word[None, :]
        if VALUE_SIZE == VALUE_PAD:
            values = tl.load(value_ptrs)
        else:
            values = tl.load(value_ptrs, mask=(2 * value_word < VALUE_SIZE)[None, :], other=0)
        if HALVES:
            value_even, value_odd = unpack_values(values, CODE)
        else:
            value_even, value_odd = unpack_words(values, query_ptr.dtype.element_ty, CODE, PACKED)
        acc_even = tl.dot(weights, value_even, acc_even * decay[:, None], input_precision="ieee")
        acc_odd = tl.dot(weights, value_odd, acc_odd * decay[:, None], input_precision="ieee")

    running_sum = tl.sum(lane_sums, 1)
    if HAS_SINKS:
        running_sum += tl.exp2(sink - running_max)
    running_sum = tl.where(running_sum > 0, running_sum, 1.0)
    if TOKEN_SCALES:
        factor = 1.0 / (LIFT * running_sum)
    elif HALVES:
        factor = tl.load(value_scale_ptr) / (value_unit(CODE) * running_sum)
    else:
        factor = tl.load(value_scale_ptr) / running_sum
    even = acc_even * factor[:, None]
    odd = acc_odd * factor[:, None]
    store_mask = row_exists[:, None] & (2 * value_word < VALUE_SIZE)[None, :]
    out_ptrs = out_ptr + (token_index * stride_out_token + head * stride_out_head)[:, None] + 2 * value_word[None, :]
    if SPLIT:
        if split_size < num_keys:
            lse = running_max + tl.log2(running_sum)
            partial = (token_index * NUM_HEADS + head) * tl.num_programs(2) + split
            tl.store(partial_lse_ptr + partial, lse, mask=row_exists)
            partial_ptrs = partial_out_ptr + (partial * VALUE_SIZE)[:, None] + 2 * value_word[None, :]
            tl.store(partial_ptrs, even, mask=store_mask)
            tl.store(partial_ptrs + 1, odd, mask=store_mask)
        else:
            tl.store(out_ptrs, even.to(out_ptr.dtype.element_ty), mask=store_mask)
            tl.store(out_ptrs + 1, odd.to(out_ptr.dtype.element_ty), mask=store_mask)
    else:
        tl.store(out_ptrs, even.to(out_ptr.dtype.element_ty), mask=store_mask)
        tl.store(out_ptrs + 1, odd.to(out_ptr.dtype.element_ty), mask=store_mask)
