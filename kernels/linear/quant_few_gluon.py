"""The Gluon kernel behind quant_few.py: a few rows of x beside packed codes (planes.py), which go from memory to the
registers that tensor cores read, without shared memory, barriers or one warp's waiting for another. Only a row that
stands alone is copied to shared memory, once."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..launch.pdl_gluon import launch_dependents, wait

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
    """Values [BATCH, rows] of a group of each block, as they are; groups after the last one are that."""
    group = gl.minimum(block * BLOCK_K // GROUP + part, last)
    return gl.load(ptr + group[:, None] * stride + row[None, :])


@gluon.jit
def _times(values, of_group):
    return values * gl.expand_dims(of_group.to(gl.float32), 2)


@gluon.jit
def _codes_ahead(rows, block, blocks, block_stride, word, EVEN: gl.constexpr):
    """Words of the rows in these blocks. Past the last one: that again where nobody multiplies it, else 0."""
    if EVEN:
        block = gl.minimum(block, blocks - 1)
        ptrs = rows[None, :, None] + block[:, None, None] * block_stride + word[None, None, :]
        return gl.load(ptrs, eviction_policy="evict_first")
    else:
        ptrs = rows[None, :, None] + block[:, None, None] * block_stride + word[None, None, :]
        return gl.load(ptrs, mask=(block < blocks)[:, None, None], other=0, eviction_policy="evict_first")


@gluon.jit
def _row_in_shared(x_ptr, K, STEPS: gl.constexpr, BATCH: gl.constexpr, PLANES: gl.constexpr, PLANE: gl.constexpr):
    """A row of x as iterations and planes read it: [STEPS * PLANES, BATCH, PLANE], zeros past its end."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // PLANE, PLANE // 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    step = gl.arange(0, STEPS * PLANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    block = gl.arange(0, BATCH, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    i = gl.arange(0, PLANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = ((step // PLANES * BATCH + block) * PLANES + step % PLANES) * PLANE + i
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    by_step: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS * PLANES, BATCH, PLANE], whole)
    async_copy.async_copy_global_to_shared(shared, x_ptr + column, mask=column < K)
    async_copy.commit_group()
    async_copy.wait_group(0)
    return shared._reinterpret(x_ptr.dtype.element_ty, [STEPS * PLANES, BATCH, PLANE], by_step)


@gluon.jit(do_not_specialize=["M"])
def quant_few_kernel(
    x_ptr, words_ptr, scales_ptr, shifts_ptr, bias_ptr, out_ptr,
    M, N, K, blocks, groups, stride_x, stride_out, row_stride, block_stride, tile_stride, group_stride,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr,
    PLANE: gl.constexpr, PLANES: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr,
    ADD: gl.constexpr, EVEN: gl.constexpr, BLOCK_N: gl.constexpr, TILE_ROWS: gl.constexpr, AHEAD: gl.constexpr,
    PREFETCH: gl.constexpr, PIPELINED: gl.constexpr, STEPS: gl.constexpr, UNUSED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[m, n] = x[m] · w[n] + b[n]. A warp multiplies AHEAD blocks of columns at a time, every num_warps-th; the sums
    meet at the end. ADD: to what is there. PIPELINED: codes and, where a block has one group, scales are loaded an
    iteration ahead, the first before the wait. STEPS, with one row: x is read once, into shared memory, for up to so
    many iterations: behind the weight's own loads each would wait for the memory."""
    BLOCK_K: gl.constexpr = PLANE * PLANES
    SCALED: gl.constexpr = PLANES if GROUP == 0 or GROUP >= BLOCK_K else GROUP // PLANE
    BATCH: gl.constexpr = gl.num_warps() * AHEAD
    SCALES_AHEAD: gl.constexpr = PIPELINED and GROUP > 0 and SCALED == PLANES
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, COLUMNS])
    # A thread's neighbouring words stay together: what it loads at once is what it multiplies.
    left: gl.constexpr = gl.DotOperandLayout(0, mma, PLANE // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, PLANE // 8)
    scaled: gl.constexpr = gl.SliceLayout(2, mma)

    if UNUSED > 0:  # KiB of shared memory, so that no more programs fit on a multiprocessor than it is to have
        unused = gl.allocate_shared_memory(gl.int16, [UNUSED, 512], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    n0 = gl.program_id(0) * BLOCK_N  # tiles of TILE_ROWS are whole programs': rows past N are in the padding
    if PDL:
        # While the kernel before this one ends, the first codes come into the L2 cache.
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, gl.num_warps()], [0, 1])
        first_row = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
        first_block = gl.arange(0, BATCH, layout=gl.SliceLayout(0, layout))
        codes = words_ptr + (first_row // TILE_ROWS).to(gl.int64) * tile_stride + first_row % TILE_ROWS * row_stride
        for turn in gl.static_range(1 if PIPELINED else 0, PREFETCH):
            fetched = gl.minimum(turn * BATCH + first_block, blocks - 1)
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; // $0", "=r,l",
                [(codes[:, None] + fetched[None, :] * block_stride).to(gl.int64)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        if not PIPELINED:
            wait()
            launch_dependents()  # only now: the next kernel may read x, too (lora.py)

    batch = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
    row = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    word = gl.arange(0, PLANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    rows = words_ptr + (row // TILE_ROWS).to(gl.int64) * tile_stride + row % TILE_ROWS * row_stride
    block = gl.arange(0, BATCH, layout=gl.SliceLayout(1, scaled))
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scaled))
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, mma))
    n_out = n0 + gl.arange(0, BLOCK_N, layout=of_row)
    if GROUP == 0:
        row_scale = gl.load(scales_ptr + n_out).to(gl.float32)
        if HAS_SHIFT:
            row_shift = gl.load(shifts_ptr + n_out).to(gl.float32)
    if PIPELINED:
        next_words = _codes_ahead(rows, batch, blocks, block_stride, word, EVEN)
        if SCALES_AHEAD:
            next_scale = _of_group(scales_ptr, block, 0, groups - 1, group_stride, n, BLOCK_K, GROUP)
            if HAS_SHIFT:
                next_shift = _of_group(shifts_ptr, block, 0, groups - 1, group_stride, n, BLOCK_K, GROUP)
        if PDL:
            wait()
            launch_dependents()
    x_batch = gl.arange(0, BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    i = gl.arange(0, PLANE, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    column = gl.expand_dims(x_batch[:, None] * BLOCK_K + i[None, :], 2)
    # Rows of x past the last one are that again, and their results are dropped.
    m = gl.minimum(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right))), M - 1)
    x_ptrs = x_ptr + m[None, None, :] * stride_x + column
    if STEPS > 0:
        row_of_x = _row_in_shared(x_ptr, K, STEPS, BATCH, PLANES, PLANE)
    ones = gl.full([BATCH, BLOCK_N, PLANE], 1.0, dtype, left)
    zeros = gl.zeros([BATCH, BLOCK_N, COLUMNS], gl.float32, mma)
    acc = zeros
    inputs = zeros  # of the group: their sum, in all rows
    for start in range(0, blocks, BATCH):
        if PIPELINED:  # what is past the end is not multiplied
            words, place = next_words, start + BATCH + batch
            next_words = _codes_ahead(rows, place, blocks, block_stride, word, EVEN)
            if SCALES_AHEAD:
                scale, behind = next_scale, start + BATCH + block
                next_scale = _of_group(scales_ptr, behind, 0, groups - 1, group_stride, n, BLOCK_K, GROUP)
                if HAS_SHIFT:
                    shift = next_shift
                    next_shift = _of_group(shifts_ptr, behind, 0, groups - 1, group_stride, n, BLOCK_K, GROUP)
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
                if STEPS > 0:
                    x = row_of_x.index(start // BATCH * PLANES + plane).load(gl.SliceLayout(2, right))
                    x, _ = gl.broadcast(gl.expand_dims(x, 2), gl.zeros([BATCH, PLANE, COLUMNS], dtype, right))
                elif EVEN:
                    x = gl.load(x_ptrs + k)
                else:
                    x = gl.load(x_ptrs + k, mask=k + column < K, other=0.0)
                total = mma_v2(_decoded(words, plane, ASM0, ASM1, ASM2, ASM3, dtype), x, total)
                if HAS_SHIFT:
                    inputs = mma_v2(ones, x, inputs)
            if GROUP == 0:
                acc = total
            else:
                if not SCALES_AHEAD:
                    scale = _of_group(scales_ptr, start + block, part, groups - 1, group_stride, n, BLOCK_K, GROUP)
                acc += _times(total, scale)
                if HAS_SHIFT:
                    if not SCALES_AHEAD:
                        shift = _of_group(shifts_ptr, start + block, part, groups - 1, group_stride, n, BLOCK_K, GROUP)
                    acc -= _times(inputs, shift)
                    inputs = zeros
    y = gl.sum(acc, 0)
    if GROUP == 0:
        y *= row_scale[:, None]
        if HAS_SHIFT:
            y -= gl.sum(inputs, 0) * row_shift[:, None]
    if HAS_BIAS:
        y += gl.load(bias_ptr + n_out, mask=n_out < N, other=0.0).to(gl.float32)[:, None]
    m = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, mma)))
    out_ptrs = out_ptr + (m.to(gl.int64)[None, :] * stride_out + n_out[:, None])
    there = (n_out < N)[:, None] & (m < M)[None, :]
    if ADD:
        y += gl.load(out_ptrs, mask=there, other=0.0).to(gl.float32)
    gl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=there)
    if UNUSED > 0:
        unused._keep_alive()
