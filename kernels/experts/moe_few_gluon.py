"""The Gluon kernel behind moe_few.py: one row of x beside packed codes, which go from memory to the registers that
tensor cores read, without shared memory, barriers or one warp's waiting for another.

Tensor cores multiply eight columns at least, and there is one row. So column c of them is plane c of that row's block:
a thread loads x once a block, and not once a plane. Of a plane's product only its own column counts, and these, one of
each plane's, stand side by side for one product with the groups' scales.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..launch.pdl_gluon import launch_dependents, wait
from ..linear.quant_few_gluon import COLUMNS, _decoded

ROWS = gl.constexpr(16)  # of the weight, an instruction


@gluon.jit
def _activated(gate, up, limit, ACT: gl.constexpr):
    """gating.activated"""
    if ACT == 1:
        gate = gl.minimum(gate, limit)
        return gate / (1 + gl.exp(-1.702 * gate)) * (gl.minimum(gl.maximum(up, -limit), limit) + 1.0)
    elif ACT == 2:
        return gate / (1 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        return gate / (1 + gl.exp(-gate)) * up


@gluon.jit
def _scaled_x(x, TO_X: gl.constexpr):
    if TO_X == "":
        return x
    else:
        return gl.inline_asm_elementwise(TO_X, "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _of_groups(
    rows, block, plane, last, stride, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, SCALED: gl.constexpr,
    PLANES: gl.constexpr,
):  # fmt: skip
    """Values [BATCH, rows, planes] of groups, of one for all of a block's planes [BATCH, rows, 1]; groups after the
    last one are that. rows: pointers [1, rows, 1] to those of the first group."""
    if SCALED == PLANES:
        group = gl.minimum(block * BLOCK_K // GROUP, last)
    else:
        group = gl.minimum(block * (PLANES // SCALED) + plane // SCALED, last)
    return gl.load(rows + group * stride)


@gluon.jit
def experts_few_kernel(
    x_ptr, words_ptr, scales_ptr, shifts_ptr, bias_ptr, out_ptr, experts_ptr,
    num_experts, N, K, padded_n, blocks, groups, stride_x, stride_words, stride_scales, row_stride, block_stride,
    tile_stride, group_stride, stride_bias, limit,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr, TO_X: gl.constexpr,
    UNIT: gl.constexpr, BACK: gl.constexpr, PLANE: gl.constexpr, PLANES: gl.constexpr, GROUP: gl.constexpr,
    HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr,
    ACT: gl.constexpr, TILE_ROWS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[pair, n] = w[expert, n] · x[pair // TOP_K] + b for ROWS rows n, or half as many of gate and the same of up,
    activated and multiplied. A warp multiplies AHEAD blocks of columns at a time, every num_warps-th; the sums meet at
    the end. UNIT is what a decoded 1 is, BACK undoes that and what TO_X did to x."""
    if PDL:
        launch_dependents()
        wait()
    pair = gl.program_id(1)
    expert = gl.load(experts_ptr + pair).to(gl.int64)
    if expert >= num_experts:
        return
    BLOCK_K: gl.constexpr = PLANE * PLANES
    SCALED: gl.constexpr = PLANES if GROUP == 0 or GROUP >= BLOCK_K else GROUP // PLANE
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    BATCH: gl.constexpr = gl.num_warps() * AHEAD
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, ROWS, COLUMNS])
    # A thread's neighbouring words stay together: what it loads at once is what it multiplies.
    left: gl.constexpr = gl.DotOperandLayout(0, mma, PLANE // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, PLANE // 8)

    # Rows 0 to 7 of an instruction meet rows 8 to 15 in a thread: gate meets up. All are in one tile of TILE_ROWS, and
    # those past N in the padding.
    n0 = gl.program_id(0) * WIDTH
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    words_ptr += expert * stride_words + (n0 // TILE_ROWS).to(gl.int64) * tile_stride + n0 % TILE_ROWS * row_stride
    part_stride = (padded_n // TILE_ROWS).to(gl.int64) * tile_stride
    rows = words_ptr + r // WIDTH * part_stride + r % WIDTH * row_stride
    batch = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    word = gl.arange(0, PLANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    word_ptrs = gl.expand_dims(gl.expand_dims(rows, 0), 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    batch = gl.expand_dims(gl.expand_dims(batch, 1), 2)

    x_batch = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    i = gl.arange(0, PLANE, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    x_plane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right))) % PLANES
    column = gl.expand_dims(x_batch[:, None] * BLOCK_K + i[None, :], 2) + x_plane[None, None, :] * PLANE
    x_ptrs = x_ptr + (pair // TOP_K).to(gl.int64) * stride_x + column

    block = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))
    plane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma))) % PLANES
    block, plane = gl.expand_dims(gl.expand_dims(block, 1), 2), gl.expand_dims(gl.expand_dims(plane, 0), 1)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    row = gl.expand_dims(gl.expand_dims(n0 + row % WIDTH + row // WIDTH * padded_n, 0), 2)
    scales_ptr += expert * stride_scales
    shifts_ptr += expert * stride_scales

    ones = gl.full([BATCH, ROWS, PLANE], UNIT, dtype, left)
    zeros = gl.zeros([BATCH, ROWS, COLUMNS], gl.float32, mma)
    acc = zeros
    inputs = zeros  # of a plane: their sum, in all rows
    if GROUP > 0:  # scales are loaded an iteration ahead: else ptxas puts that off until they are needed
        scale = _of_groups(scales_ptr + row, block, plane, groups - 1, group_stride, BLOCK_K, GROUP, SCALED, PLANES)
        if HAS_SHIFT:
            shift = _of_groups(shifts_ptr + row, block, plane, groups - 1, group_stride, BLOCK_K, GROUP, SCALED, PLANES)
    for start in range(0, blocks, BATCH):
        place = start + batch if EVEN else gl.minimum(start + batch, blocks - 1)
        words = gl.load(word_ptrs + place * block_stride, eviction_policy="evict_first")
        if EVEN:
            x = gl.load(x_ptrs + start * BLOCK_K)
        else:
            x = gl.load(x_ptrs + start * BLOCK_K, mask=start * BLOCK_K + column < K, other=0.0)
        if GROUP > 0:
            after = start + BATCH + block
            next_scale = _of_groups(
                scales_ptr + row, after, plane, groups - 1, group_stride, BLOCK_K, GROUP, SCALED, PLANES
            )
            if HAS_SHIFT:
                next_shift = _of_groups(
                    shifts_ptr + row, after, plane, groups - 1, group_stride, BLOCK_K, GROUP, SCALED, PLANES
                )
        x = _scaled_x(x, TO_X)
        total = zeros
        for p in gl.static_range(PLANES):
            products = mma_v2(_decoded(words, p, ASM0, ASM1, ASM2, ASM3, dtype), x, zeros)
            total = gl.where(plane == p, products, total) if p else products
        if GROUP == 0:
            acc += total
            if HAS_SHIFT:
                inputs = mma_v2(ones, x, inputs)
        else:
            acc += total * scale.to(gl.float32)
            scale = next_scale
            if HAS_SHIFT:
                acc -= mma_v2(ones, x, zeros) * shift.to(gl.float32)
                shift = next_shift
    y = gl.sum(gl.sum(acc, 2), 0)
    # A plane has COLUMNS / PLANES columns.
    y *= BACK * PLANES / COLUMNS
    r = gl.arange(0, ROWS, layout=y.type.layout)
    n = n0 + r % WIDTH
    row = n + r // WIDTH * padded_n
    if GROUP == 0:
        y *= gl.load(scales_ptr + row).to(gl.float32)
        if HAS_SHIFT:
            inputs = gl.sum(gl.sum(inputs, 2), 0) * (BACK * PLANES / COLUMNS)
            y -= inputs * gl.load(shifts_ptr + row).to(gl.float32)
    if HAS_BIAS:
        y += gl.load(bias_ptr + expert * stride_bias + n + r // WIDTH * N, mask=n < N, other=0.0).to(gl.float32)
    out_ptr += pair.to(gl.int64) * N
    if GATED:
        both = gl.reshape(y, [2, WIDTH])
        half = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, both.type.layout)), 1)
        gate = gl.sum(gl.where(half == 0, both, 0.0), 0)
        up = gl.sum(gl.where(half == 1, both, 0.0), 0)
        y = _activated(gate, up, limit, ACT)
        n = n0 + gl.arange(0, WIDTH, layout=y.type.layout)
    gl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
