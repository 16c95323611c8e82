"""The Gluon kernel behind linear_hopper.py: a warp-specialised, persistent product, with SwiGLU or the addition to the
residual stream in the same pass.

A producer warp fetches tiles of x and of the weight by TMA, up to STAGES ahead; one or two consumer warpgroups of 64
rows each multiply them, with the same tile of the weight. 64 x 256 is the largest tile whose sums a warpgroup's
registers hold, and the larger the tile, the less is read from shared memory for each multiplication: under a sustained
load the card is limited by its power, and there a product can save some.
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

ROWS = gl.constexpr(64)  # of x, a consumer
BLOCK_N = gl.constexpr(256)  # rows of the weight
BLOCK_K = gl.constexpr(64)
HALF_N = gl.constexpr(BLOCK_N // 2)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place(tile, tiles_m, tiles_n, group):
    """A tile's number → its row and column of tiles. Programs that run together share `group` tiles of x."""
    first = tile // (group * tiles_n) * group
    rows = gl.minimum(tiles_m - first, group)
    within = tile % (group * tiles_n)
    return first + within % rows, within // rows


@gluon.jit
def _produce(
    x_desc, weight_desc, out_desc, smem, bars, tiles, half, GATED: gl.constexpr, ADD: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, _ = smem
    full, empty = bars
    tiles_m, tiles_n, tiles_k, group = tiles
    halves = weight_smem._reinterpret(weight_desc.dtype, [STAGES * 2, HALF_N, BLOCK_K], weight_desc.layout)
    summands = weight_smem._reinterpret(out_desc.dtype, [STAGES * 2, ROWS, HALF_N], out_desc.layout)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, group)
        # Gated, the tile is as many rows of gate and, in the other half, of up.
        left = n * HALF_N if GATED else n * BLOCK_N
        right = left + (half if GATED else HALF_N)
        for k in range(tiles_k):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(bar, (CONSUMERS * ROWS + BLOCK_N) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(x_desc, [m * CONSUMERS * ROWS, k * BLOCK_K], bar, x_smem.index(stage))
            tma.async_copy_global_to_shared(weight_desc, [left, k * BLOCK_K], bar, halves.index(stage * 2))
            tma.async_copy_global_to_shared(weight_desc, [right, k * BLOCK_K], bar, halves.index(stage * 2 + 1))
            step += 1
        if ADD:  # what the consumers add takes a stage each, in the place of the weight
            for which in gl.static_range(CONSUMERS):
                stage = step % STAGES
                bar = full.index(stage)
                row = (m * CONSUMERS + which) * ROWS
                mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
                mbarrier.expect(bar, ROWS * BLOCK_N * 2)
                tma.async_copy_global_to_shared(out_desc, [row, left], bar, summands.index(stage * 2))
                tma.async_copy_global_to_shared(out_desc, [row, right], bar, summands.index(stage * 2 + 1))
                step += 1


@gluon.jit
def _sleep(nanoseconds: gl.constexpr):
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; // $0", "=r,n", [nanoseconds], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _consume(
    which: gl.constexpr, out_desc, smem, bars, tiles, GATED: gl.constexpr, ADD: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HOLD: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, out_smem = smem
    full, empty = bars
    tiles_m, tiles_n, tiles_k, group = tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    x_boxes = x_smem._reinterpret(x_smem.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], x_smem.layout)
    summands = weight_smem._reinterpret(out_desc.dtype, [STAGES * 2, ROWS, HALF_N], out_desc.layout)
    left_smem = out_smem.index(which)
    right_smem = left_smem if GATED else out_smem.index(CONSUMERS + which)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, group)
        row = (m * CONSUMERS + which) * ROWS
        left = n * HALF_N if GATED else n * BLOCK_N
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        for k in range(tiles_k):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x = x_boxes.index(stage * CONSUMERS + which)
            weight = weight_smem.index(stage).permute((1, 0))
            if HOLD > 0:  # the one before has ended, and this one takes as long as if it had begun now
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                _sleep(HOLD)
            acc = warpgroup_mma(x, weight, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if HOLD == 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)

        # A thread has the sums of both halves in the same places.
        first, second = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, HALF_N]), [0, 2, 1]))
        if GATED:
            first = first / (1.0 + gl.exp2(first * -_LOG2E)) * second
        if ADD:
            mine = step + which
            stage = mine % STAGES
            mbarrier.wait(full.index(stage), mine // STAGES & 1)
            first += summands.index(stage * 2).load(first.type.layout).to(gl.float32)
            second += summands.index(stage * 2 + 1).load(second.type.layout).to(gl.float32)
        tma.store_wait(0)  # until the tile before has left shared memory
        left_smem.store(first.to(out_desc.dtype))
        if not GATED:
            right_smem.store(second.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, left], left_smem)
        if not GATED:
            tma.async_copy_shared_to_global(out_desc, [row, left + HALF_N], right_smem)
        if ADD:
            for _ in gl.static_range(CONSUMERS):  # a stage waits for all consumers, whichever it was for
                stage = step % STAGES
                # Before it is filled, what is counted there are the arrivals of those who read the weight in it: two of
                # this one would stand for both.
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "tiles_k", "group", "half"])
def linear_kernel(
    x_desc, weight_desc, out_desc, tiles_m, tiles_n, tiles_k, group, half,
    GATED: gl.constexpr, ADD: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HOLD_B: gl.constexpr = 0,
):  # fmt: skip
    """HOLD_B, of tests: by how many nanoseconds each product of the second consumer is held up."""
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, CONSUMERS * ROWS, BLOCK_K], x_desc.layout)
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    OUT_TILES: gl.constexpr = CONSUMERS if GATED else 2 * CONSUMERS
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [OUT_TILES, ROWS, HALF_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    A: gl.constexpr = 0
    B: gl.constexpr = 1
    smem = (x_smem, weight_smem, out_smem)
    bars = (full, empty)
    tiles = (tiles_m, tiles_n, tiles_k, group)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (A, out_desc, smem, bars, tiles, GATED, ADD, CONSUMERS, STAGES, 0)),
                (_consume, (B, out_desc, smem, bars, tiles, GATED, ADD, CONSUMERS, STAGES, HOLD_B)),
                (_produce, (x_desc, weight_desc, out_desc, smem, bars, tiles, half, GATED, ADD, CONSUMERS, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (A, out_desc, smem, bars, tiles, GATED, ADD, CONSUMERS, STAGES, 0)),
                (_produce, (x_desc, weight_desc, out_desc, smem, bars, tiles, half, GATED, ADD, CONSUMERS, STAGES)),
            ],
            [1],
            [40],
        )
