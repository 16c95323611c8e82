"""The Gluon kernels behind lora.py for cards with mma.sync: y += B h whose y goes between memory and registers in whole
lines, and h = A x whose operands never see shared memory.

Columns of y are the rows of the instruction, tokens its columns. Of 64 columns, which four instructions multiply, a
thread gets two of each: they are numbered such that these are eight neighbours, 16 bytes of y. So are r and k, of which
a thread's four or eight are neighbours, too: only names change, as long as both operands change them alike.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..launch.pdl_gluon import launch_dependents, wait


@constexpr_function
def _doubling(first, end):
    values = []
    while first < end:
        values.append(first)
        first *= 2
    return values


@constexpr_function
def _b_layout(warps, groups, rank):
    """Of [groups · warps · 64 columns, rank]: a thread has eight neighbouring columns, four r of each 16."""
    registers = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    registers += [[0, r] for r in _doubling(16, rank)]
    registers += [[n, 0] for n in _doubling(64 * warps, 64 * warps * groups)]
    lanes = [[0, 4], [0, 8], [8, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[n, 0] for n in _doubling(64, 64 * warps)], [], [64 * warps * groups, rank]
    )


@constexpr_function
def _y_layout(warps, groups, tokens):
    """Of [tokens, groups · warps · 64 columns], as instructions leave the sums: eight neighbouring columns of two
    tokens of each eight."""
    registers = [[0, 1], [0, 2], [0, 4], [1, 0]]
    registers += [[token, 0] for token in _doubling(8, tokens)]
    registers += [[0, n] for n in _doubling(64 * warps, 64 * warps * groups)]
    lanes = [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, n] for n in _doubling(64, 64 * warps)], [], [tokens, 64 * warps * groups]
    )


@constexpr_function
def _h_layout(warps, tokens, rank):
    """Of [splits, tokens, rank]: all threads sum up, each its few numbers of every split."""
    vector = max(1, min(4, tokens * rank // (32 * warps)))
    across = min(32, rank // vector)
    return gl.BlockedLayout([1, 1, vector], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _tokens(order_ptr, at, end, CHUNK: gl.constexpr, layout: gl.constexpr):
    """Those at places at … at + CHUNK - 1 of the order; any where there is none."""
    place = at + gl.arange(0, CHUNK, layout=layout)
    return gl.load(order_ptr + place, mask=place < end, other=0).to(gl.int64)


@gluon.jit
def _as_operand(b, WARPS: gl.constexpr, GROUPS: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr):
    """B [GROUPS · WARPS · 64 columns, RANK] as it was loaded, with columns and r by their other names."""
    named = gl.reshape(b, [GROUPS, WARPS, 8, 4, 2, RANK // 16, 4, 2, 2])
    renamed = gl.reshape(gl.permute(named, [0, 3, 1, 4, 2, 5, 7, 6, 8]), [GROUPS * WARPS * 64, RANK])
    return gl.convert_layout(renamed, layout)


@gluon.jit
def _times_low(
    b, h, dtype: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr, RANK: gl.constexpr, CHUNK: gl.constexpr,
    of_y: gl.constexpr,
):  # fmt: skip
    """B of _as_operand times the sum of h [splits, CHUNK, RANK] → fp32 [CHUNK, columns]."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    low = gl.reshape(gl.sum(h, 0).to(dtype), [CHUNK, RANK // 16, 4, 2, 2])
    low = gl.reshape(gl.permute(low, [1, 3, 2, 4, 0]), [RANK, CHUNK])
    zeros = gl.zeros([GROUPS * WARPS * 64, CHUNK], gl.float32, mma)
    acc = mma_v2(b, gl.convert_layout(low, right), zeros)
    by_token = gl.permute(gl.reshape(acc, [GROUPS, 4, WARPS, 2, 8, CHUNK]), [5, 0, 2, 4, 1, 3])
    return gl.convert_layout(gl.reshape(by_token, [CHUNK, GROUPS * WARPS * 64]), of_y)


@gluon.jit(do_not_specialize=["T", "C", "splits"])
def lora_expand_kernel(
    h_ptr, b_ptr, columns_ptr, used_ptr, y_ptr, slots_ptr, starts_ptr, ends_ptr, order_ptr,
    T, N, C, splits, stride_slot, stride_b, stride_y,
    SPLITS: gl.constexpr, RANK: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y[order[place], c] += Σ_r b[slot, c, r] · Σ_split h[split, place, part · RANK + r], CHUNK places at a time; a
    tile has up to CHUNK · CHUNKS. Of y, starts of rows and of products are multiples of 8."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_N: gl.constexpr = GROUPS * WARPS * 64
    dtype: gl.constexpr = b_ptr.dtype.element_ty
    of_b: gl.constexpr = _b_layout(WARPS, GROUPS, RANK)
    of_y: gl.constexpr = _y_layout(WARPS, GROUPS, CHUNK)
    of_h: gl.constexpr = _h_layout(WARPS, CHUNK, RANK)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)

    block, tile = gl.program_id(0), gl.program_id(1)  # empty tiles come last
    if PDL:
        launch_dependents()
    # Tiles, the order and B were written before the step: all of it is read before the wait. What does not depend on
    # each other is on its way at the same time: `used` decides about the end alone.
    start = gl.load(starts_ptr + tile)
    end = gl.load(ends_ptr + tile)
    slot = gl.load(slots_ptr + tile).to(gl.int64)
    first = gl.load(columns_ptr + block) // 8 * 8  # the compiler is to see that these are whole pieces
    last = gl.load(columns_ptr + C + block) // 8 * 8
    part = gl.load(columns_ptr + 2 * C + block)
    exists = start < end
    used = gl.load(used_ptr + slot, mask=exists, other=0)
    c = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, of_b))
    r = gl.arange(0, RANK, layout=gl.SliceLayout(0, of_b))
    b_ptrs = b_ptr + slot * stride_slot + c.to(gl.int64)[:, None] * stride_b + r[None, :]
    loaded = gl.load(b_ptrs, mask=((c < last) & exists)[:, None], other=0.0)
    token = _tokens(order_ptr, start, end, CHUNK, gl.SliceLayout(1, of_y))
    if CHUNKS > 1:
        token_next = _tokens(order_ptr, start + CHUNK, end, CHUNK, gl.SliceLayout(1, of_y))
    if PDL:
        wait()
    if used == 0:
        return
    column = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_y))
    inside = (column < last)[None, :]
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, of_y))
    split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_h)))
    i_h = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_h)))
    r_h = gl.arange(0, RANK, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_h)))
    h_ptr += part * RANK
    of_splits = gl.expand_dims(split.to(gl.int64)[:, None] * T + (start + i_h)[None, :], 2) * N
    h_ptrs = h_ptr + of_splits + gl.expand_dims(r_h[None, :], 1)
    h_there = gl.expand_dims((split < splits)[:, None] & (i_h < end - start)[None, :], 2)
    h = gl.load(h_ptrs, mask=h_there, other=0.0)
    y_ptrs = y_ptr + (token[:, None] * stride_y + column[None, :])
    y = gl.load(y_ptrs, mask=(i < end - start)[:, None] & inside, other=0.0)
    b = _as_operand(loaded, WARPS, GROUPS, RANK, left)
    for at in range(start, end, CHUNK):
        now, now_ptrs, now_h = y, y_ptrs, h
        if CHUNKS > 1:  # the next ones are on their way while these are multiplied
            behind = end - at - CHUNK
            y_ptrs = y_ptr + (token_next[:, None] * stride_y + column[None, :])
            y = gl.load(y_ptrs, mask=(i < behind)[:, None] & inside, other=0.0)
            there = gl.expand_dims((split < splits)[:, None] & (i_h < behind)[None, :], 2)
            h = gl.load(h_ptrs + (at + CHUNK - start).to(gl.int64) * N, mask=there, other=0.0)
            token_next = _tokens(order_ptr, at + 2 * CHUNK, end, CHUNK, gl.SliceLayout(1, of_y))
        delta = _times_low(b, now_h, dtype, WARPS, GROUPS, RANK, CHUNK, of_y)
        gl.store(
            now_ptrs, (now.to(gl.float32) + delta).to(y_ptr.dtype.element_ty), mask=(i < end - at)[:, None] & inside
        )


@gluon.jit
def _silu_mul(gate, up):
    """As _gated_kernel of activation.py has it, bit for bit."""
    gate = gate.to(gl.float32)
    return gate * (1.0 / (1.0 + gl.exp(-gate))) * up.to(gl.float32)


@gluon.jit(do_not_specialize=["T", "size", "splits"])
def lora_expand_silu_kernel(
    h_ptr, b_ptr, used_ptr, y_ptr, out_ptr, slots_ptr, starts_ptr, ends_ptr, order_ptr, counts_ptr,
    T, N, size, splits, stride_slot, stride_b, stride_y, stride_out,
    SPLITS: gl.constexpr, RANK: gl.constexpr, CHUNK: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[t] = silu(gate) · up of y[t] = cat(gate, up), to which lora_expand_kernel would add and which it would round,
    and which stays as it is. counts: places of tiles, behind which stand the tokens that have no adapter, and tiles, of
    up to CHUNK places; behind them come programs for CHUNK such tokens each. N: of h, those of gate and those of up, or
    those of both alike. size: columns of gate, a multiple of 8."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_N: gl.constexpr = GROUPS * WARPS * 64
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    of_b: gl.constexpr = _b_layout(WARPS, GROUPS, RANK)
    of_y: gl.constexpr = _y_layout(WARPS, GROUPS, CHUNK)
    of_h: gl.constexpr = _h_layout(WARPS, CHUNK, RANK)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)

    block, tile = gl.program_id(0), gl.program_id(1)
    if PDL:
        launch_dependents()
    # What is read before the wait, and what at the same time: as in lora_expand_kernel.
    places = gl.load(counts_ptr)
    tiles = gl.load(counts_ptr + 1)
    adapted = tile < tiles
    start = gl.load(starts_ptr + tile, mask=adapted, other=0)
    end = gl.load(ends_ptr + tile, mask=adapted, other=0)
    slot = gl.load(slots_ptr + tile, mask=adapted, other=0).to(gl.int64)
    start = gl.where(adapted, start, places + (tile - tiles) * CHUNK)
    end = gl.where(adapted, end, T)
    used = gl.load(used_ptr + slot, mask=adapted, other=0)
    half = size // 8 * 8  # the compiler is to see that these are whole pieces
    c = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, of_b))
    r = gl.arange(0, RANK, layout=gl.SliceLayout(0, of_b))
    b_ptrs = b_ptr + slot * stride_slot + c.to(gl.int64)[:, None] * stride_b + r[None, :]
    b_gate = gl.load(b_ptrs, mask=((c < half) & adapted)[:, None], other=0.0)
    b_up = gl.load(b_ptrs + half.to(gl.int64) * stride_b, mask=((c < half) & adapted)[:, None], other=0.0)
    token = _tokens(order_ptr, start, end, CHUNK, gl.SliceLayout(1, of_y))
    if PDL:
        wait()
    column = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_y))
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, of_y))
    there = (i < end - start)[:, None] & (column < half)[None, :]
    y_ptrs = y_ptr + (token[:, None] * stride_y + column[None, :])
    gate = gl.load(y_ptrs, mask=there, other=0.0)
    up = gl.load(y_ptrs + half, mask=there, other=0.0)
    if used != 0:
        split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_h)))
        i_h = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_h)))
        r_h = gl.arange(0, RANK, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_h)))
        of_splits = gl.expand_dims(split.to(gl.int64)[:, None] * T + (start + i_h)[None, :], 2) * N
        h_ptrs = h_ptr + of_splits + gl.expand_dims(r_h[None, :], 1)
        h_there = gl.expand_dims((split < splits)[:, None] & (i_h < end - start)[None, :], 2)
        h_gate = gl.load(h_ptrs, mask=h_there, other=0.0)
        h_up = gl.load(h_ptrs + (N - RANK), mask=h_there, other=0.0)
        of_gate = _as_operand(b_gate, WARPS, GROUPS, RANK, left)
        of_up = _as_operand(b_up, WARPS, GROUPS, RANK, left)
        to_gate = _times_low(of_gate, h_gate, dtype, WARPS, GROUPS, RANK, CHUNK, of_y)
        to_up = _times_low(of_up, h_up, dtype, WARPS, GROUPS, RANK, CHUNK, of_y)
        gate = (gate.to(gl.float32) + to_gate).to(dtype)
        up = (up.to(gl.float32) + to_up).to(dtype)
    gl.store(out_ptr + (token[:, None] * stride_out + column[None, :]), _silu_mul(gate, up).to(dtype), mask=there)


@gluon.jit(do_not_specialize=["T", "rounds"])
def lora_shrink_kernel(
    x_ptr, a_ptr, used_ptr, h_ptr, slots_ptr, starts_ptr, ends_ptr, order_ptr,
    T, N, K, rounds, stride_x, stride_slot, stride_a,
    EVEN: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BESIDE: gl.constexpr,
    LEADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """h[split, place, n] = Σ_k a[slot, n, k] · x[order[place], k] of a tile of up to TOKENS places, over `rounds` times
    num_warps · BLOCK_K values of k, of which each warp multiplies BLOCK_K; their sums meet at the end. BESIDE: the
    kernel before has waited before it let this one start, so that x is there; its end is waited for last. LEADS: lets
    the next kernel start, though it may not be a dependent one itself."""
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)

    block, split, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)  # empty tiles come last
    if PDL or LEADS:
        launch_dependents()
    # What is read before the wait, and what at the same time: as in lora_expand_kernel, but for BESIDE.
    start = gl.load(starts_ptr + tile)
    end = gl.load(ends_ptr + tile)
    slot = gl.load(slots_ptr + tile).to(gl.int64)
    exists = start < end
    used = gl.load(used_ptr + slot, mask=exists, other=0)
    first = split * rounds * (WARPS * BLOCK_K)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    n = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    i = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    k = gl.expand_dims(first + warp[:, None] * BLOCK_K, 2) + gl.expand_dims(i[None, :], 1)
    wanted = gl.expand_dims(((n < N) & exists)[None, :], 2)
    a_ptrs = a_ptr + slot * stride_slot + gl.expand_dims(n.to(gl.int64)[None, :], 2) * stride_a + k
    if EVEN:
        a = gl.load(a_ptrs, mask=wanted, other=0.0)
    else:
        a = gl.load(a_ptrs, mask=wanted & (k < K), other=0.0)
    token = _tokens(order_ptr, start, end, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    if PDL and not BESIDE:
        wait()
    if used == 0:
        if PDL and BESIDE:
            wait()
        return
    warp_x = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    i_x = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    m = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    k_x = gl.expand_dims(first + warp_x[:, None] * BLOCK_K + i_x[None, :], 2)
    given = gl.expand_dims((m < end - start)[None, :], 1)
    x_ptrs = x_ptr + gl.expand_dims((token * stride_x)[None, :], 1) + k_x
    CACHE: gl.constexpr = ".cg" if BESIDE else ""  # before the wait: L1 may still have what was there before x
    if EVEN:
        x = gl.load(x_ptrs, mask=given, other=0.0, cache_modifier=CACHE)
    else:
        x = gl.load(x_ptrs, mask=given & (k_x < K), other=0.0, cache_modifier=CACHE)
    acc = gl.zeros([WARPS, BLOCK_N, TOKENS], gl.float32, mma)
    behind = gl.minimum(K - first, rounds * (WARPS * BLOCK_K))
    for at in range(WARPS * BLOCK_K, behind + WARPS * BLOCK_K, WARPS * BLOCK_K):
        a_now, x_now = a, x  # the next ones are on their way while these are multiplied
        if EVEN:
            a = gl.load(a_ptrs + at, mask=wanted & (at < behind), other=0.0)
            x = gl.load(x_ptrs + at, mask=given & (at < behind), other=0.0, cache_modifier=CACHE)
        else:
            a = gl.load(a_ptrs + at, mask=wanted & (at < behind) & (k + at < K), other=0.0)
            x = gl.load(x_ptrs + at, mask=given & (at < behind) & (k_x + at < K), other=0.0, cache_modifier=CACHE)
        acc = mma_v2(a_now, x_now, acc)
    h = gl.sum(acc, 0)
    n_h = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, h.type.layout))
    m_h = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, h.type.layout))
    h_ptrs = h_ptr + (split.to(gl.int64) * T + start) * N + (m_h[None, :] * N + n_h[:, None])
    gl.store(h_ptrs, h, mask=(n_h < N)[:, None] & (m_h < end - start)[None, :])
    if PDL and BESIDE:
        wait()
