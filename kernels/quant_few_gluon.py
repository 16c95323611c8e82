"""The Gluon kernel behind quant_few.py: a few rows of x beside packed codes (planes.py), which go from memory to the
registers that tensor cores read, without shared memory, barriers or one warp's waiting for another."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .pdl_gluon import launch_dependents, wait

COLUMNS = gl.constexpr(8)  # rows of x, an instruction


@gluon.jit
def _decoded(words, plane: gl.constexpr, ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr,
             ASM3: gl.constexpr, dtype: gl.constexpr):  # fmt: skip
    ASM: gl.constexpr = ASM0 if plane == 0 else ASM1 if plane == 1 else ASM2 if plane == 2 else ASM3
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _of_group(ptr, block, part: gl.constexpr, last, stride, row, BLOCK_K: gl.constexpr, GROUP: gl.constexpr):
    """Values [BATCH, rows, 1] of a group of each block; groups after the last one are that."""
    group = gl.minimum(block * BLOCK_K // GROUP + part, last)
    return gl.expand_dims(gl.load(ptr + group[:, None] * stride + row[None, :]).to(gl.float32), 2)


@gluon.jit(do_not_specialize=["M"])
def quant_few_kernel(
    x_ptr, words_ptr, scales_ptr, shifts_ptr, bias_ptr, out_ptr,
    M, N, K, blocks, groups, stride_x, stride_out, row_stride, block_stride, tile_stride, group_stride,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr,
    PLANE: gl.constexpr, PLANES: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr,
    ADD: gl.constexpr, EVEN: gl.constexpr, BLOCK_N: gl.constexpr, TILE_ROWS: gl.constexpr, AHEAD: gl.constexpr,
    PREFETCH: gl.constexpr, PIPELINED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[m, n] = x[m] · w[n] + b[n]. A warp multiplies AHEAD blocks of columns at a time, every num_warps-th; the sums
    meet at the end. ADD: to what is there. PIPELINED: codes are loaded an iteration ahead, the first before the
    wait."""
    BLOCK_K: gl.constexpr = PLANE * PLANES
    SCALED: gl.constexpr = PLANES if GROUP == 0 or GROUP >= BLOCK_K else GROUP // PLANE
    BATCH: gl.constexpr = gl.num_warps() * AHEAD
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, COLUMNS])
    # A thread's neighbouring words stay together: what it loads at once is what it multiplies.
    left: gl.constexpr = gl.DotOperandLayout(0, mma, PLANE // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, PLANE // 8)
    scaled: gl.constexpr = gl.SliceLayout(2, mma)

    n0 = gl.program_id(0) * BLOCK_N  # tiles of TILE_ROWS are whole programs': rows past N are in the padding
    if PDL:
        launch_dependents()
        # While the kernel before this one ends, the first codes come into the L2 cache.
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, gl.num_warps()], [0, 1])
        first_row = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
        first_block = gl.arange(0, BATCH, layout=gl.SliceLayout(0, layout))
        codes = words_ptr + (first_row // TILE_ROWS).to(gl.int64) * tile_stride + first_row % TILE_ROWS * row_stride
        for turn in gl.static_range(1 if PIPELINED else 0, PREFETCH):
            fetched = gl.minimum(turn * BATCH + first_block, blocks - 1)
            gl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
                [(codes[:, None] + fetched[None, :] * block_stride).to(gl.int64), PLANE * 2],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        if not PIPELINED:
            wait()

    batch = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    row = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    word = gl.arange(0, PLANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    rows = words_ptr + (row // TILE_ROWS).to(gl.int64) * tile_stride + row % TILE_ROWS * row_stride
    if PIPELINED:
        next_words = gl.load(
            rows[None, :, None] + batch[:, None, None] * block_stride + word[None, None, :],
            mask=(batch < blocks)[:, None, None], other=0, eviction_policy="evict_first",
        )  # fmt: skip
        if PDL:
            wait()
    block = gl.arange(0, BATCH, layout=gl.SliceLayout(1, scaled))
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scaled))
    x_batch = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    i = gl.arange(0, PLANE, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    column = gl.expand_dims(x_batch[:, None] * BLOCK_K + i[None, :], 2)
    # Rows of x past the last one are that again, and their results are dropped.
    m = gl.minimum(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right))), M - 1)
    x_ptrs = x_ptr + m[None, None, :] * stride_x + column
    ones = gl.full([BATCH, BLOCK_N, PLANE], 1.0, dtype, left)
    zeros = gl.zeros([BATCH, BLOCK_N, COLUMNS], gl.float32, mma)
    acc = zeros
    inputs = zeros  # of the group: their sum, in all rows
    for start in range(0, blocks, BATCH):
        if PIPELINED:  # what is past the end is not loaded, and not multiplied
            words, place = next_words, start + BATCH + batch
            next_words = gl.load(
                rows[None, :, None] + place[:, None, None] * block_stride + word[None, None, :],
                mask=(place < blocks)[:, None, None], other=0, eviction_policy="evict_first",
            )  # fmt: skip
        else:
            place = start + batch if EVEN else gl.minimum(start + batch, blocks - 1)
            words = gl.load(
                rows[None, :, None] + place[:, None, None] * block_stride + word[None, None, :],
                eviction_policy="evict_first",
            )
        for part in gl.static_range(PLANES // SCALED):
            total = acc if GROUP == 0 else zeros
            for plane in gl.static_range(part * SCALED, (part + 1) * SCALED):
                k = start * BLOCK_K + plane * PLANE
                if EVEN:
                    x = gl.load(x_ptrs + k)
                else:
                    x = gl.load(x_ptrs + k, mask=k + column < K, other=0.0)
                total = mma_v2(_decoded(words, plane, ASM0, ASM1, ASM2, ASM3, dtype), x, total)
                if HAS_SHIFT:
                    inputs = mma_v2(ones, x, inputs)
            if GROUP == 0:
                acc = total
            else:
                here = start + block
                acc += total * _of_group(scales_ptr, here, part, groups - 1, group_stride, n, BLOCK_K, GROUP)
                if HAS_SHIFT:
                    acc -= inputs * _of_group(shifts_ptr, here, part, groups - 1, group_stride, n, BLOCK_K, GROUP)
                    inputs = zeros
    y = gl.sum(acc, 0)
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, y.type.layout))
    if GROUP == 0:
        y *= gl.load(scales_ptr + n).to(gl.float32)[:, None]
        if HAS_SHIFT:
            y -= gl.sum(inputs, 0) * gl.load(shifts_ptr + n).to(gl.float32)[:, None]
    if HAS_BIAS:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    m = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, y.type.layout))
    out_ptrs = out_ptr + (m.to(gl.int64)[None, :] * stride_out + n[:, None])
    there = (n < N)[:, None] & (m < M)[None, :]
    if ADD:
        y += gl.load(out_ptrs, mask=there, other=0.0).to(gl.float32)
    gl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=there)
