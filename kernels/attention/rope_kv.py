"""Rotate queries and keys and write keys and values into the paged cache, in one launch.

What apply_rope_torch or qk_norm_rope_torch (see rope.py) and then write_kv_torch do; it runs for the whole batch before
any attention reads the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from ..norm.activation import INFINITE, magnitude
from .kv_fp8 import FIXED_SCALES, TOKEN_SCALES, encode, encode_triton, scale_kind, token_scale, token_scales
from .rope import apply_rope_torch, qk_norm_rope_torch, rotate_heads


def rope_write_kv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 0.0,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Rotates query in place; stores the rotated key[t], and value[t], at cache slot slots[t].

    query [T, H, D], key [T, KV, D], value [T, KV, Dv], same dtype, last dimension contiguous (views into a fused
    projection are fine). key's own memory may or may not be rotated afterwards.
    positions int32 [T] and cos_sin fp32 [max_pos, rot_dim] as in apply_rope_torch.
    key_cache [num_blocks, page, KV, D], value_cache [num_blocks, page, KV, Dv]; a different dtype is converted.
    slots int32 or int64 [T]: block * page + offset; -1 stores nothing (padding). Slots must not repeat.
    q_weight and k_weight [D], both or neither: RMSNorm with eps over each head before the rotation.
    key_scales and value_scales fp32 [num_blocks, page, KV], both or neither: of a cache of codes (kv_fp8.py), in which
    case both are of one kind: read where they are fixed, else written with the token. With fixed ones, the value of a
    head whose key is not finite becomes NaN.
    All in fp32, rounded once to query's dtype, then to the cache's.
    """
    write = rope_write_kv_triton if query.is_cuda else rope_write_kv_torch
    write(
        query, key, value, positions, cos_sin, key_cache, value_cache, slots, q_weight, k_weight, eps,
        key_scales, value_scales,
    )  # fmt: skip


def rope_write_kv_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 0.0,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    if scale_kind(key_scales) == FIXED_SCALES:
        value = value.masked_fill(~key.isfinite().all(-1, keepdim=True), float("nan"))
    if q_weight is None or k_weight is None:
        apply_rope_torch(query, key, positions, cos_sin)
    else:
        qk_norm_rope_torch(query, key, positions, cos_sin, q_weight, k_weight, eps)
    if key_scales is None or value_scales is None:
        write_kv_torch(key, value, key_cache, value_cache, slots)
    else:
        write_codes_torch(key, key_cache, key_scales, slots)
        write_codes_torch(value, value_cache, value_scales, slots)


def write_codes_torch(heads: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> None:
    """Stores heads[t] [KV, D] as codes at cache slot slots[t], with a scale where they have one each."""
    used = slots >= 0
    slots, heads = slots[used].long(), heads[used]
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    if scale_kind(scales) == TOKEN_SCALES:
        scales[block, offset] = token_scales(heads, cache.dtype)
    cache.view(torch.uint8)[block, offset] = encode(heads, scales[block, offset], cache.dtype).view(torch.uint8)


def write_kv_torch(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Stores key[t] and value[t] at cache slot slots[t]; shapes as in rope_write_kv."""
    if slots.shape[0] == 1:  # the single-stream decode step: two copies instead of eight operators
        only_slot = int(slots)
        if only_slot >= 0:
            key_cache[divmod(only_slot, key_cache.shape[1])] = key[0]
            value_cache[divmod(only_slot, key_cache.shape[1])] = value[0]
        return
    used = slots >= 0
    slots = slots.long()
    if not bool(used.all()):
        slots, key, value = slots[used], key[used], value[used]
    page = key_cache.shape[1]
    block, offset = slots // page, slots % page
    key_cache[block, offset] = key.to(key_cache.dtype)
    value_cache[block, offset] = value.to(value_cache.dtype)


def rope_write_kv_triton(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 0.0,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One program a token and group of heads: first the groups of the query, then of the key, then of the value."""
    num_tokens, num_heads, dim = query.shape
    if num_tokens == 0:
        return
    _, page, num_kv_heads, value_size = value_cache.shape
    norm = q_weight is not None and k_weight is not None
    if key_scales is None or value_scales is None:
        key_scales = value_scales = None
    kind, no_strides = scale_kind(key_scales), (0, 0, 0)
    half = cos_sin.shape[1] // 2
    block = triton.next_power_of_2(half)
    # Eight heads a program: as many as the usual number of key heads, so that no lane idles.
    group = min(8, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    blocks = triton.cdiv(num_heads, group) + 2 * triton.cdiv(num_kv_heads, group)
    _rope_write_kv_kernel[(num_tokens, blocks)](
        query, key, value, positions, cos_sin, key_cache, value_cache, slots,
        q_weight if norm else query, k_weight if norm else key, num_heads, num_kv_heads,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos_sin.stride(0),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        query if key_scales is None else key_scales, query if value_scales is None else value_scales,
        *(no_strides if key_scales is None else key_scales.stride()),
        *(no_strides if value_scales is None else value_scales.stride()), eps,
        PAGE=page, DIM=dim, HALF=half, BLOCK=block, TAIL_BLOCK=triton.next_power_of_2(max(1, dim - 2 * half)),
        VALUE_SIZE=value_size, VALUE_PAD=triton.next_power_of_2(value_size), DIM_PAD=triton.next_power_of_2(dim),
        GROUP=group, NORM=norm, SCALES=kind,
        num_warps=min(8, max(1, group * block // 256)), **pdl_options(query, yields=True),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_write_kv_kernel(
    query_ptr, key_ptr, value_ptr, positions_ptr, cos_sin_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    q_weight_ptr, k_weight_ptr, num_heads, num_kv_heads,
    query_token, query_head, key_token, key_head, value_token, value_head, table_stride,
    key_cache_block, key_cache_slot, key_cache_head, value_cache_block, value_cache_slot, value_cache_head,
    key_scale_ptr, value_scale_ptr, key_scale_block, key_scale_slot, key_scale_head,
    value_scale_block, value_scale_slot, value_scale_head, eps,
    PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups = tl.cdiv(num_heads, GROUP)
    kv_groups = tl.cdiv(num_kv_heads, GROUP)
    # Positions and slots are those of the whole step, and the table is nobody's to write (pdl.py has the rule): they
    # come while the product before this kernel ends.
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * table_stride
    slot = tl.load(slots_ptr + token)
    lane = tl.arange(0, BLOCK)[None, :] + tl.zeros([GROUP, 1], tl.int32)
    cos = tl.load(angle_ptr + lane, mask=lane < HALF, other=0.0)
    sin = tl.load(angle_ptr + HALF + lane, mask=lane < HALF, other=0.0)
    if PDL:
        gdc_wait()
    if group < query_groups:
        place = query_ptr + token * query_token
        rotate_heads(
            place, query_head, place, query_head, group * GROUP, num_heads, cos, sin, q_weight_ptr, eps, query_ptr, 0,
            DIM, HALF, BLOCK, TAIL_BLOCK, GROUP, NORM, 0,
        )  # fmt: skip
    else:
        if slot >= 0:
            page = (slot // PAGE).to(tl.int64)
            offset = slot % PAGE
            if group < query_groups + kv_groups:
                rotate_heads(
                    key_ptr + token * key_token, key_head,
                    key_cache_ptr + page * key_cache_block + offset * key_cache_slot, key_cache_head,
                    (group - query_groups) * GROUP, num_kv_heads, cos, sin, k_weight_ptr, eps,
                    key_scale_ptr + page * key_scale_block + offset * key_scale_slot, key_scale_head,
                    DIM, HALF, BLOCK, TAIL_BLOCK, GROUP, NORM, SCALES,
                )  # fmt: skip
            else:
                head = (group - query_groups - kv_groups) * GROUP + tl.arange(0, GROUP)[:, None].to(tl.int64)
                column = tl.arange(0, VALUE_PAD)[None, :]
                mask = (head < num_kv_heads) & (column < VALUE_SIZE)
                place = value_cache_ptr + page * value_cache_block + offset * value_cache_slot
                place += head * value_cache_head + column
                cache_dtype: tl.constexpr = value_cache_ptr.dtype.element_ty
                source = value_ptr + token * value_token + head * value_head + column
                if SCALES == 0:
                    tl.store(place, tl.load(source, mask=mask).to(cache_dtype), mask)
                else:
                    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
                    scale_ptrs = value_scale_ptr + page * value_scale_block + offset * value_scale_slot
                    scale_ptrs += head * value_scale_head
                    if SCALES == 1:
                        scale = tl.load(scale_ptrs, mask=head < num_kv_heads, other=1.0)
                        lanes = tl.arange(0, DIM_PAD)[None, :]
                        key_ptrs = key_ptr + token * key_token + head * key_head + lanes
                        key = tl.load(key_ptrs, mask=(head < num_kv_heads) & (lanes < DIM), other=0.0).to(tl.float32)
                        broken = tl.max(magnitude(key), axis=1) >= INFINITE
                        value = tl.where(broken[:, None], float("nan"), value)
                    else:
                        scale = token_scale(tl.max(magnitude(value), axis=1), cache_dtype)[:, None]
                        tl.store(scale_ptrs, scale, mask=head < num_kv_heads)
                    tl.store(place, encode_triton(value, scale, cache_dtype), mask)
