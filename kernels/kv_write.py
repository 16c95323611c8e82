"""Write a step's new keys and values into the paged cache; runs for the whole batch before any attention reads it."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_key_block, stride_key_slot, stride_key_cache_head,
    stride_value_block, stride_value_slot, stride_value_cache_head,
    PAGE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = (slot // PAGE).to(tl.int64)
    offset = slot % PAGE
    head = tl.arange(0, HEADS_PAD).to(tl.int64)

    column = tl.arange(0, KEY_PAD)
    mask = (head < NUM_KV_HEADS)[:, None] & (column < KEY_SIZE)[None, :]
    source = token * stride_key_token + (head * stride_key_head)[:, None] + column[None, :]
    target = block * stride_key_block + offset * stride_key_slot
    target += (head * stride_key_cache_head)[:, None] + column[None, :]
    key = tl.load(key_ptr + source, mask=mask)
    tl.store(key_cache_ptr + target, key.to(key_cache_ptr.dtype.element_ty), mask=mask)

    column = tl.arange(0, VALUE_PAD)
    mask = (head < NUM_KV_HEADS)[:, None] & (column < VALUE_SIZE)[None, :]
    source = token * stride_value_token + (head * stride_value_head)[:, None] + column[None, :]
    target = block * stride_value_block + offset * stride_value_slot
    target += (head * stride_value_cache_head)[:, None] + column[None, :]
    value = tl.load(value_ptr + source, mask=mask)
    tl.store(value_cache_ptr + target, value.to(value_cache_ptr.dtype.element_ty), mask=mask)


def write_kv_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`write_kv` on Triton: one program a token."""
    num_tokens = slots.shape[0]
    if num_tokens == 0:
        return
    _, page, num_kv_heads, key_size = key_cache.shape
    value_size = value_cache.shape[3]
    _write_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        PAGE=page,
        NUM_KV_HEADS=num_kv_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        KEY_PAD=triton.next_power_of_2(key_size),
        VALUE_PAD=triton.next_power_of_2(value_size),
        num_warps=4,
    )


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`write_kv` in plain torch."""
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


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store key[t] and value[t] at cache slot slots[t], in place.

    key [T, KV, D], value [T, KV, Dv]: last dimension contiguous, otherwise any strides (slices of a fused qkv product).
    key_cache [num_blocks, page, KV, D], value_cache [num_blocks, page, KV, Dv]; a different dtype is converted.
    slots int32 or int64 [T]: block * page + offset; -1 skips the token (padding). Slots must not repeat.
    """
    if key.is_cuda:
        write_kv_triton(key, value, key_cache, value_cache, slots)
    else:
        write_kv_torch(key, value, key_cache, value_cache, slots)
