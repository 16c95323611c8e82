"""The Triton kernels behind lora.py: h = A x and y += B h of a tile, and the same of a one-hot x."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _tile(tile, slots_ptr, starts_ptr, ends_ptr, used_ptr, BLOCK_M: tl.constexpr):
    """→ its slot; places [BLOCK_M] in the order, and which of them exist; whether there is anything to do."""
    start = tl.load(starts_ptr + tile)
    end = tl.load(ends_ptr + tile)
    slot = tl.load(slots_ptr + tile).to(tl.int64)
    used = tl.load(used_ptr + slot, mask=start != end, other=0)
    place = start + tl.arange(0, BLOCK_M)
    return slot, place, place < end, used != 0


@triton.jit(do_not_specialize=["T", "steps"])
def shrink_kernel(
    x_ptr, a_ptr, used_ptr, h_ptr, slots_ptr, starts_ptr, ends_ptr, order_ptr,
    T, N, K, steps, stride_x, stride_slot, stride_a,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h[split, place, n] = Σ_k x[order[place], k] · a[slot, n, k], over `steps` · STEP values of k."""
    tile, split = tl.program_id(0), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    # Which tokens and which slot was written before the step, as was A: all of it is known before the wait.
    slot, place, exists, there = _tile(tile, slots_ptr, starts_ptr, ends_ptr, used_ptr, BLOCK_M)
    token = tl.load(order_ptr + place, mask=exists, other=0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = split * steps * STEP
    k = first + tl.arange(0, BLOCK_K)
    if PDL:
        if EVEN_K:  # A's first block goes into the L2 cache; an empty tile takes some other slot's
            rows = a_ptr + tl.where(there, slot, 0) * stride_slot + tl.minimum(n, N - 1) * stride_a
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r",
                [(rows + first).to(tl.int64), STEP * 2],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        gdc_wait()
    if not there:
        return
    x_ptrs = x_ptr + token[:, None] * stride_x + k[None, :]
    a_ptrs = a_ptr + slot * stride_slot + n[None, :] * stride_a + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    left = tl.minimum(K - first, steps * STEP)
    for at in range(0, left, BLOCK_K):
        given, wanted = exists[:, None], (n < N)[None, :]
        if not EVEN_K:
            inside = tl.arange(0, BLOCK_K) < left - at
            given, wanted = given & inside[None, :], wanted & inside[:, None]
        x = tl.load(x_ptrs + at, mask=given, other=0.0)
        a = tl.load(a_ptrs + at, mask=wanted, other=0.0).to(x.dtype)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    h_ptrs = h_ptr + split.to(tl.int64) * T * N + place[:, None] * N + n[None, :]
    tl.store(h_ptrs, acc, mask=exists[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["T", "C", "splits"])
def expand_kernel(
    h_ptr, b_ptr, columns_ptr, used_ptr, y_ptr, slots_ptr, starts_ptr, ends_ptr, order_ptr,
    T, N, C, splits, stride_slot, stride_b, stride_y,
    SPLITS: tl.constexpr, RANK: tl.constexpr, MULTIPLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[order[place], c] += Σ_r b[slot, c, r] · Σ_split h[split, place, part · RANK + r]."""
    tile, block = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    # As in shrink_kernel: B, too, is there before the step.
    slot, place, exists, there = _tile(tile, slots_ptr, starts_ptr, ends_ptr, used_ptr, BLOCK_M)
    c = tl.multiple_of(tl.load(columns_ptr + block), MULTIPLE) + tl.arange(0, BLOCK_N)
    last = tl.load(columns_ptr + C + block)
    part = tl.load(columns_ptr + 2 * C + block)
    token = tl.load(order_ptr + place, mask=exists, other=0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    wanted = (c < last) & there
    b_ptrs = b_ptr + slot * stride_slot + c.to(tl.int64)[None, :] * stride_b + r[:, None]
    b = tl.load(b_ptrs, mask=wanted[None, :], other=0.0)
    if PDL:
        gdc_wait()
    if not there:
        return
    mask = exists[:, None] & (c < last)[None, :]
    y_ptrs = y_ptr + token[:, None] * stride_y + c[None, :]
    if BLOCK_M == 16:  # on its way beside h; more would not fit into the registers
        y = tl.load(y_ptrs, mask=mask, other=0.0)
    # All splits at once, added up in a fixed order.
    split = tl.arange(0, SPLITS)
    h_ptrs = h_ptr + split.to(tl.int64)[:, None, None] * (T * N) + place[None, :, None] * N
    h_ptrs += part * RANK + r[None, None, :]
    h_mask = (split < splits)[:, None, None] & exists[None, :, None]
    low = tl.sum(tl.load(h_ptrs, mask=h_mask, other=0.0), 0)
    acc = tl.dot(low.to(b.dtype), b, input_precision="ieee")
    for at in range(BLOCK_R, RANK, BLOCK_R):
        b = tl.load(b_ptrs + at, mask=wanted[None, :], other=0.0)
        low = tl.sum(tl.load(h_ptrs + at, mask=h_mask, other=0.0), 0)
        acc = tl.dot(low.to(b.dtype), b, acc, input_precision="ieee")
    if BLOCK_M > 16:
        y = tl.load(y_ptrs, mask=mask, other=0.0)
    tl.store(y_ptrs, (y.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def look_up_kernel(
    ids_ptr, a_ptr, used_ptr, h_ptr, slots_ptr, starts_ptr, ends_ptr, order_ptr, N, stride_slot, stride_a,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """h[place, n] = a[slot, ids[order[place]], n]."""
    tile = tl.program_id(0)
    start = tl.load(starts_ptr + tile)
    end = tl.load(ends_ptr + tile)
    slot = tl.load(slots_ptr + tile).to(tl.int64)
    if start == end:
        return
    if tl.load(used_ptr + slot) == 0:
        return
    place = start + tl.arange(0, BLOCK_M)
    exists = place < end
    token = tl.load(order_ptr + place, mask=exists, other=0)
    id = tl.load(ids_ptr + token, mask=exists, other=0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    mask = exists[:, None] & (n < N)[None, :]
    found = tl.load(a_ptr + slot * stride_slot + id[:, None] * stride_a + n[None, :], mask=mask, other=0.0)
    tl.store(h_ptr + place[:, None] * N + n[None, :], found.to(tl.float32), mask=mask)
