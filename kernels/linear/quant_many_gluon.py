"""The Gluon kernel behind quant_many.py: many rows of x beside packed codes (planes.py), warp-specialised, persistent.

A producer warp fetches tiles of x and of the codes by TMA; two consumer warpgroups of 64 rows of the weight each make
numbers of their codes in the registers that the tensor cores read, a plane ahead of the product that runs, and multiply
them with the same tile of x. The weight is the left operand, so that it never has to be in shared memory as numbers.
Codes come through shared memory as codes: there the producer is further ahead than registers would allow, and no
consumer waits for memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # of the weight, a consumer
CONSUMERS = gl.constexpr(2)
HALF = gl.constexpr(64)  # columns of a tile of x: a swizzled row of shared memory
STEP = gl.constexpr(128)  # columns whose codes come together
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name changed with triton 3.7


@gluon.jit
def _place(item, tiles_m, tiles_n, steps, splits):
    """An item's number → its tile of x, its tile of the weight, its split, that one's steps. Those that run together
    share codes."""
    split = item // (tiles_m * tiles_n)
    tile = item % (tiles_m * tiles_n)
    return tile % tiles_m, tile // tiles_m, split, split * steps // splits, (split + 1) * steps // splits


@gluon.jit
def _produce(
    x_desc, words_desc, smem, bars, tiles, TOKENS: gl.constexpr, BOXES: gl.constexpr, BITS: gl.constexpr,
    STAGES: gl.constexpr, CODE_STAGES: gl.constexpr,
):  # fmt: skip
    x_smem, words_smem = smem
    x_full, x_empty, words_full, words_empty = bars
    tiles_m, tiles_n, steps, splits, blocks = tiles
    WIDTH: gl.constexpr = words_desc.block_type.shape[1]
    stage_of_all = 0
    step_of_all = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * splits, gl.num_programs(0)):
        m, n, _, first, end = _place(item, tiles_m, tiles_n, steps, splits)
        for step in range(first, end):
            slot = step_of_all % CODE_STAGES
            bar = words_full.index(slot)
            mbarrier.wait(words_empty.index(slot), (step_of_all // CODE_STAGES + 1) & 1)
            mbarrier.expect(bar, CONSUMERS * BOXES * ROWS * WIDTH * 2)
            for box in gl.static_range(CONSUMERS * BOXES):
                tile = n * CONSUMERS + box // BOXES
                place = words_smem.index(slot * (CONSUMERS * BOXES) + box)
                if BITS == 4:
                    row = (tile * blocks + step * BOXES + box % BOXES) * ROWS
                    tma.async_copy_global_to_shared(words_desc, [row, 0], bar, place)
                else:
                    tma.async_copy_global_to_shared(words_desc, [tile * ROWS, step * WIDTH], bar, place)
            step_of_all += 1
            for half in gl.static_range(STEP // HALF):
                stage = stage_of_all % STAGES
                bar = x_full.index(stage)
                mbarrier.wait(x_empty.index(stage), (stage_of_all // STAGES + 1) & 1)
                mbarrier.expect(bar, TOKENS * HALF * 2)
                tma.async_copy_global_to_shared(
                    x_desc, [m * TOKENS, step * STEP + half * HALF], bar, x_smem.index(stage)
                )
                stage_of_all += 1


@gluon.jit
def _number(words, scale, shift, plane: gl.constexpr, ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr,
            ASM3: gl.constexpr, FOLD: gl.constexpr, HAS_SHIFT: gl.constexpr, dtype: gl.constexpr):  # fmt: skip
    """A plane's numbers; FOLD: times scale, less shift. Those are two numbers each: rounded, and what that leaves."""
    ASM: gl.constexpr = ASM0 if plane == 0 else ASM1 if plane == 1 else ASM2 if plane == 2 else ASM3
    if not FOLD:
        return _assembled(ASM, "=r,r", [words], dtype)
    elif HAS_SHIFT:
        return _assembled(
            ASM, "=r,r,r,r,r,r",
            [words, _column(scale[0], words), _column(scale[1], words), _column(shift[0], words),
             _column(shift[1], words)], dtype,
        )  # fmt: skip
    else:
        return _assembled(ASM, "=r,r,r,r", [words, _column(scale[0], words), _column(scale[1], words)], dtype)


@gluon.jit
def _assembled(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, values, dtype: gl.constexpr):
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, values, dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, values, dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _column(values, words):
    _, values = gl.broadcast(words, gl.expand_dims(values, 1))
    return values


@gluon.jit
def _two(value, sign: gl.constexpr, dtype: gl.constexpr):
    """fp32 → its bits as a number of dtype, and those of what that leaves."""
    value = value * sign
    high = value.to(dtype)
    low = (value - high.to(gl.float32)).to(dtype)
    return high.to(gl.int16, bitcast=True), low.to(gl.int16, bitcast=True)


@gluon.jit
def _of_groups(ptr, step, last, stride, GROUP: gl.constexpr, COUNT: gl.constexpr):
    """Rows' values of a step's groups; groups after the last one are that."""
    values = ()
    for i in gl.static_range(COUNT):
        group = 0 if GROUP == 0 else gl.minimum((step * STEP + i * (STEP // COUNT)) // GROUP, last)
        values += (gl.load(ptr + group * stride),)  # type: ignore[assignment]
    return values


@gluon.jit
def _consume(
    which: gl.constexpr, smem, bars, tiles, pointers, sizes, ASMS: gl.constexpr, PLANE: gl.constexpr,
    PLANES: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr, FACTOR: gl.constexpr,
    TOKENS: gl.constexpr, BOXES: gl.constexpr, BITS: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    x_smem, words_smem = smem
    x_full, x_empty, words_full, words_empty = bars
    tiles_m, tiles_n, steps, splits, _ = tiles
    scales_ptr, shifts_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr = pointers
    M, N, groups, group_stride, stride_out = sizes
    dtype: gl.constexpr = x_smem.dtype
    BLOCK_K: gl.constexpr = PLANE * PLANES
    BLOCKS: gl.constexpr = STEP // BLOCK_K
    FOLD: gl.constexpr = GROUP > 0 or HAS_SHIFT
    # Scales of a step: with groups of 16 to 64 columns several.
    COUNT: gl.constexpr = 1 if GROUP == 0 or GROUP >= STEP else STEP // GROUP
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    last_row = (N + ROWS - 1) // ROWS * ROWS - 1
    stage_of_all = 0
    step_of_all = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * splits, gl.num_programs(0)):
        m_tile, n_tile, split, first, end = _place(item, tiles_m, tiles_n, steps, splits)
        n0 = (n_tile * CONSUMERS + which) * ROWS
        row = gl.minimum(n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, left)), last_row)
        if FOLD:
            next_scale = _of_groups(scales_ptr + row, first, groups - 1, group_stride, GROUP, COUNT)
            next_shift = next_scale
            if HAS_SHIFT:
                next_shift = _of_groups(shifts_ptr + row, first, groups - 1, group_stride, GROUP, COUNT)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, mma)
        for step in range(first, end):
            slot = step_of_all % CODE_STAGES
            mbarrier.wait(words_full.index(slot), step_of_all // CODE_STAGES & 1)
            words = ()
            for j in gl.static_range(BLOCKS):
                box = words_smem.index((slot * CONSUMERS + which) * BOXES + (j if BITS == 4 else 0))
                if BITS == 8 and BLOCKS > 1:
                    words += (box.slice(j * PLANE, PLANE, dim=1).load(left),)  # type: ignore[assignment]
                else:
                    words += (box.load(left),)  # type: ignore[assignment]
            mbarrier.arrive(words_empty.index(slot), count=1)
            step_of_all += 1
            if FOLD:
                scale = next_scale
                shift = next_shift
                if GROUP > 0:  # one step ahead: on their way while this one is multiplied
                    next_scale = _of_groups(scales_ptr + row, step + 1, groups - 1, group_stride, GROUP, COUNT)
                    next_shift = next_scale
                    if HAS_SHIFT:
                        next_shift = _of_groups(shifts_ptr + row, step + 1, groups - 1, group_stride, GROUP, COUNT)
            for place in gl.static_range(STEP // PLANE):
                if FOLD:
                    scale_2 = _two(scale[place * PLANE * COUNT // STEP].to(gl.float32), 1.0, dtype)
                    shift_2 = scale_2
                    if HAS_SHIFT:
                        shift_2 = _two(shift[place * PLANE * COUNT // STEP].to(gl.float32), -1.0, dtype)
                else:
                    scale_2 = 0
                    shift_2 = 0
                w = _number(
                    words[place // PLANES], scale_2, shift_2, place % PLANES, ASMS[0], ASMS[1], ASMS[2], ASMS[3], FOLD,
                    HAS_SHIFT, dtype,
                )  # fmt: skip
                stage = stage_of_all % STAGES
                if place * PLANE % HALF == 0:
                    mbarrier.wait(x_full.index(stage), stage_of_all // STAGES & 1)
                x = x_smem.index(stage).slice(place * PLANE % HALF, PLANE, dim=1).permute((1, 0))
                if place == 0:
                    acc = warpgroup_mma(w, x, acc, use_acc=step > first, is_async=True)
                else:
                    acc = warpgroup_mma(w, x, acc, is_async=True)
                if place < STEP // PLANE - 1:
                    # The product before has ended; this one runs while the next plane's numbers are made.
                    acc = warpgroup_mma_wait(1, deps=[acc])
                else:  # none runs over the end of the loop: ptxas would let all of them run one by one
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(x_empty.index(stage), count=1)
                if place > 0 and place * PLANE % HALF == 0:
                    mbarrier.arrive(x_empty.index((stage_of_all + STAGES - 1) % STAGES), count=1)
                if (place + 1) * PLANE % HALF == 0:
                    stage_of_all += 1

        is_last = True
        if SPLIT:
            # Splits' sums are added in their order by whoever comes last.
            tile = (n_tile * tiles_m + m_tile) * CONSUMERS + which
            at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))[:, None] * TOKENS
            at += gl.arange(0, TOKENS, layout=gl.SliceLayout(0, mma))[None, :]
            sums_ptr = partials_ptr + tile * splits * (ROWS * TOKENS)
            gl.store(sums_ptr + split * (ROWS * TOKENS) + at, acc)
            # All threads' stores come before the one thread's release; its acquire, before all threads' loads.
            _barrier()
            arrived = gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
            _barrier()
            is_last = arrived == splits - 1
            if is_last:
                gl.store(counters_ptr + tile, 0)  # for the next call, which waits for the end of this one
                # Not from L1, which does not see other SMs' stores.
                acc = gl.load(sums_ptr + at, cache_modifier=".cg")
                for other in range(1, splits):
                    acc += gl.load(sums_ptr + other * (ROWS * TOKENS) + at, cache_modifier=".cg")
        if is_last:
            n = gl.minimum(n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma)), last_row)
            if not FOLD:
                acc *= (gl.load(scales_ptr + n).to(gl.float32) * FACTOR)[:, None]
            if HAS_BIAS:
                acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
            y = gl.convert_layout(gl.permute(acc.to(out_ptr.dtype.element_ty), (1, 0)), out_layout)
            m = m_tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, out_layout))
            column = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, out_layout))
            out_ptrs = out_ptr + (m.to(gl.int64)[:, None] * stride_out + column[None, :])
            gl.store(out_ptrs, y, mask=(m < M)[:, None] & (column < N)[None, :])


@gluon.jit(do_not_specialize=["M", "tiles_m", "tiles_n", "steps", "splits", "blocks", "groups"])
def quant_many_kernel(
    x_desc, words_desc, scales_ptr, shifts_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr,
    M, N, groups, group_stride, stride_out, tiles_m, tiles_n, steps, splits, blocks,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr, PLANE: gl.constexpr,
    PLANES: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr, FACTOR: gl.constexpr,
    TOKENS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """out[m, n] = x[m] · w[n] + b[n]. Items are tiles of [CONSUMERS · ROWS, TOKENS] sums of a split of the columns."""
    BITS: gl.constexpr = 16 // PLANES
    WIDTH: gl.constexpr = words_desc.block_type.shape[1]
    smem = (
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, HALF], x_desc.layout),
        gl.allocate_shared_memory(words_desc.dtype, [CODE_STAGES * CONSUMERS * BOXES, ROWS, WIDTH], words_desc.layout),
    )
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    words_full = gl.allocate_shared_memory(gl.int64, [CODE_STAGES, 1], mbarrier.MBarrierLayout())
    words_empty = gl.allocate_shared_memory(gl.int64, [CODE_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CODE_STAGES):
        mbarrier.init(words_full.index(i), count=1)
        mbarrier.init(words_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    A: gl.constexpr = 0
    B: gl.constexpr = 1
    ASMS: gl.constexpr = (ASM0, ASM1, ASM2, ASM3)
    bars = (x_full, x_empty, words_full, words_empty)
    tiles = (tiles_m, tiles_n, steps, splits, blocks)
    pointers = (scales_ptr, shifts_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr)
    sizes = (M, N, groups, group_stride, stride_out)
    gl.warp_specialize(
        [
            (_consume, (A, smem, bars, tiles, pointers, sizes, ASMS, PLANE, PLANES, GROUP, HAS_SHIFT, HAS_BIAS, FACTOR,
                        TOKENS, BOXES, BITS, STAGES, CODE_STAGES, SPLIT)),
            (_consume, (B, smem, bars, tiles, pointers, sizes, ASMS, PLANE, PLANES, GROUP, HAS_SHIFT, HAS_BIAS, FACTOR,
                        TOKENS, BOXES, BITS, STAGES, CODE_STAGES, SPLIT)),
            (_produce, (x_desc, words_desc, smem, bars, tiles, TOKENS, BOXES, BITS, STAGES, CODE_STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
