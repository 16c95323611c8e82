"""The Gluon kernel behind linear_hopper.py: a warp-specialised, persistent product, with SwiGLU or the addition to the
residual stream in the same pass, and SwiGLU with what low-rank adapters add before it (lora.py).

A producer warp fetches tiles of x and of the weight by TMA, up to STAGES ahead; one or two consumer warpgroups of 64
rows each multiply them, with the same tile of the weight. 64 x 256 is the largest tile whose sums a warpgroup's
registers hold, and the larger the tile, the less is read from shared memory for each multiplication: under a sustained
load the card is limited by its power, and there a product can save some.

B h of a slot is a product like the others, with fewer columns: of each row h where its token has that slot, else zeros.
Their turns come between steps of K, in stages of the same ring, and who has no adapter gets the bits of the kernel
without any. From the middle on: the first steps come while h is made, and while it is read, the ring fills. Steps of K
stand between them: B's rows are short, and copies take as long for them as for long ones. h of gate meets rows of B for
gate, and zeros in the place of those for up, then h of up the others: with instructions of half the width, ptxas 12.8
has every product of the kernel wait for the one before.
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

from ..launch.pdl_gluon import wait

ROWS = gl.constexpr(64)  # of x, a consumer
BLOCK_N = gl.constexpr(256)  # rows of the weight
BLOCK_K = gl.constexpr(64)
HALF_N = gl.constexpr(BLOCK_N // 2)
ROWS_PRESENT = gl.constexpr(128)  # of x: who has the same line of slots, a multiple of any tile's
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place(tile, tiles_m, tiles_n, group):
    """A tile's number → its row and column of tiles. Programs that run together share `group` tiles of x."""
    first = tile // (group * tiles_n) * group
    rows = gl.minimum(tiles_m - first, group)
    within = tile % (group * tiles_n)
    return first + within % rows, within // rows


@gluon.jit
def _fetch(
    x_desc, weight_desc, smem, bars, m, left, right, first_k, end_k, step, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):
    """Tiles of x and of the weight, from first_k on → the ring's next step."""
    x_smem, weight_smem, _ = smem
    full, empty = bars
    halves = weight_smem._reinterpret(weight_desc.dtype, [STAGES * 2, HALF_N, BLOCK_K], weight_desc.layout)
    for k in range(first_k, end_k):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
        mbarrier.expect(bar, (CONSUMERS * ROWS + BLOCK_N) * BLOCK_K * 2)
        tma.async_copy_global_to_shared(x_desc, [m * CONSUMERS * ROWS, k * BLOCK_K], bar, x_smem.index(stage))
        tma.async_copy_global_to_shared(weight_desc, [left, k * BLOCK_K], bar, halves.index(stage * 2))
        tma.async_copy_global_to_shared(weight_desc, [right, k * BLOCK_K], bar, halves.index(stage * 2 + 1))
        step += 1
    return step


@gluon.jit
def _present(slots, row):
    """Where the slots of this row's neighbours stand, behind their number."""
    present_ptr, line, _, _ = slots
    return present_ptr + row // ROWS_PRESENT * line


@gluon.jit
def _turns(present_ptr, steps, RANK: gl.constexpr):
    """How many stages of B there are, and how many of `steps` steps of K come behind each."""
    turns = (gl.load(present_ptr) + BLOCK_K // (2 * RANK) - 1) // (BLOCK_K // (2 * RANK))
    return turns, steps // (turns + 1)


@gluon.jit
def _fetch_b(b_desc, slots, present_ptr, smem, bars, turn, left, right, step, RANK: gl.constexpr, STAGES: gl.constexpr):
    """B of a turn's slots: rows for gate and zeros, zeros and rows for up → the ring's next step."""
    SLOTS: gl.constexpr = BLOCK_K // (2 * RANK)
    weight_smem = smem[1]
    full, empty = bars
    _, _, slot_rows, nowhere = slots
    boxes = weight_smem._reinterpret(b_desc.dtype, [STAGES * 2 * (BLOCK_K // RANK), HALF_N, RANK], b_desc.layout)
    stage = step % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
    mbarrier.expect(bar, BLOCK_N * BLOCK_K * 2)
    for i in gl.static_range(SLOTS):  # behind the last slot, that of number 0: nobody's
        first_row = gl.maximum(gl.load(present_ptr + 1 + turn * SLOTS + i), 0) * slot_rows
        box = (stage * SLOTS + i) * 4
        tma.async_copy_global_to_shared(b_desc, [first_row + left, 0], bar, boxes.index(box))
        tma.async_copy_global_to_shared(b_desc, [nowhere, 0], bar, boxes.index(box + 1))
        tma.async_copy_global_to_shared(b_desc, [nowhere, 0], bar, boxes.index(box + 2))
        tma.async_copy_global_to_shared(b_desc, [first_row + right, 0], bar, boxes.index(box + 3))
    return step + 1


@gluon.jit
def _produce(
    x_desc, weight_desc, out_desc, b_desc, slots, smem, bars, tiles, half, GATED: gl.constexpr, ADD: gl.constexpr,
    RANK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    weight_smem = smem[1]
    full, empty = bars
    tiles_m, tiles_n, tiles_k, group = tiles
    summands = weight_smem._reinterpret(out_desc.dtype, [STAGES * 2, ROWS, HALF_N], out_desc.layout)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, group)
        # Gated, the tile is as many rows of gate and, in the other half, of up.
        left = n * HALF_N if GATED else n * BLOCK_N
        right = left + (half if GATED else HALF_N)
        middle = (tiles_k + 1) // 2 if RANK > 0 else tiles_k
        step = _fetch(x_desc, weight_desc, smem, bars, m, left, right, 0, middle, step, CONSUMERS, STAGES)
        if RANK > 0:
            present_ptr = _present(slots, m * CONSUMERS * ROWS)
            turns, between = _turns(present_ptr, tiles_k - middle, RANK)
            for turn in range(turns):
                step = _fetch_b(b_desc, slots, present_ptr, smem, bars, turn, left, right, step, RANK, STAGES)
                end = middle + between
                step = _fetch(x_desc, weight_desc, smem, bars, m, left, right, middle, end, step, CONSUMERS, STAGES)
                middle = end
            step = _fetch(x_desc, weight_desc, smem, bars, m, left, right, middle, tiles_k, step, CONSUMERS, STAGES)
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
def _low_of_rows(low, row, dtype: gl.constexpr, RANK: gl.constexpr, RUNS: gl.constexpr, layout: gl.constexpr):
    """Of ROWS tokens: slots, and h of gate and of up [ROWS, RANK], 0 where there is none."""
    h_ptr, slots_ptr, places_ptr, used_ptr, tokens, splits, columns = low
    token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    slot = gl.load(slots_ptr + token, mask=token < tokens, other=-1)
    place = gl.load(places_ptr + token, mask=token < tokens, other=0)
    used = gl.load(used_ptr + slot, mask=slot >= 0, other=0)
    slot = gl.where(used != 0, slot, -1)
    r = gl.arange(0, RANK, layout=gl.SliceLayout(0, layout))
    ptrs = h_ptr + (place * columns)[:, None] + r[None, :]
    if RUNS:  # what makes h
        wait()
    gate = gl.zeros([ROWS, RANK], gl.float32, layout)
    up = gl.zeros([ROWS, RANK], gl.float32, layout)
    AT_ONCE: gl.constexpr = BLOCK_K // RANK  # as many as registers hold
    for first in range(0, splits, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            there = (slot >= 0)[:, None] & (first + i < splits)
            part = ptrs + (first + i) * tokens * columns
            gate += gl.load(part, mask=there, other=0.0)
            up += gl.load(part + (columns - RANK), mask=there, other=0.0)  # gate's, where both are one product
    return slot, gate.to(dtype), up.to(dtype)


@gluon.jit
def _sleep(nanoseconds: gl.constexpr):
    gl.inline_asm_elementwise("nanosleep.u32 $1; // $0", "=r,n", [nanoseconds], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _multiply(
    which: gl.constexpr, acc, smem, bars, first_k, end_k, step, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    HOLD: gl.constexpr,
):  # fmt: skip
    """The sums of the steps of K from first_k on added → acc, the ring's next step. All stages are given back."""
    x_smem, weight_smem, _ = smem
    full, empty = bars
    x_boxes = x_smem._reinterpret(x_smem.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], x_smem.layout)
    for k in range(first_k, end_k):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x = x_boxes.index(stage * CONSUMERS + which)
        weight = weight_smem.index(stage).permute((1, 0))
        if HOLD > 0:  # the one before has ended, and this one takes as long as if it had begun now
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > first_k)
            _sleep(HOLD)
        acc = warpgroup_mma(x, weight, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if HOLD == 0:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > first_k)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=end_k > first_k)
    return acc, step


@gluon.jit
def _multiply_b(
    acc, b_desc, present_ptr, of_rows, gate_low, up_low, smem, bars, turn, step,
    RANK: gl.constexpr, STAGES: gl.constexpr, of_low: gl.constexpr,
):  # fmt: skip
    """B h of a turn's slots added → acc, the ring's next step."""
    SLOTS: gl.constexpr = BLOCK_K // (2 * RANK)
    weight_smem = smem[1]
    full, empty = bars
    boxes = weight_smem._reinterpret(b_desc.dtype, [STAGES * (BLOCK_K // RANK), BLOCK_N, RANK], b_desc.layout)
    others = gl.zeros([ROWS, RANK], b_desc.dtype, of_low)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    for i in gl.static_range(SLOTS):
        mine = (of_rows == gl.load(present_ptr + 1 + turn * SLOTS + i))[:, None]
        box = (stage * SLOTS + i) * 2
        acc = warpgroup_mma(gl.where(mine, gate_low, others), boxes.index(box).permute((1, 0)), acc)
        acc = warpgroup_mma(gl.where(mine, up_low, others), boxes.index(box + 1).permute((1, 0)), acc)
    mbarrier.arrive(empty.index(stage), count=1)
    return acc, step + 1


@gluon.jit
def _consume(
    which: gl.constexpr, out_desc, b_desc, low, slots, smem, bars, tiles, GATED: gl.constexpr, ADD: gl.constexpr,
    RANK: gl.constexpr, RUNS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HOLD: gl.constexpr,
):  # fmt: skip
    weight_smem, out_smem = smem[1], smem[2]
    full, empty = bars
    tiles_m, tiles_n, tiles_k, group = tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    summands = weight_smem._reinterpret(out_desc.dtype, [STAGES * 2, ROWS, HALF_N], out_desc.layout)
    left_smem = out_smem.index(which)
    right_smem = left_smem if GATED else out_smem.index(CONSUMERS + which)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, group)
        row = (m * CONSUMERS + which) * ROWS
        left = n * HALF_N if GATED else n * BLOCK_N
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        middle = (tiles_k + 1) // 2 if RANK > 0 else tiles_k
        acc, step = _multiply(which, acc, smem, bars, 0, middle, step, CONSUMERS, STAGES, HOLD)
        if RANK > 0:
            of_low: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
            of_rows, gate_low, up_low = _low_of_rows(low, row, b_desc.dtype, RANK, RUNS, of_low)
            present_ptr = _present(slots, row)
            turns, between = _turns(present_ptr, tiles_k - middle, RANK)
            for turn in range(turns):
                acc, step = _multiply_b(
                    acc, b_desc, present_ptr, of_rows, gate_low, up_low, smem, bars, turn, step, RANK, STAGES, of_low
                )
                end = middle + between
                acc, step = _multiply(which, acc, smem, bars, middle, end, step, CONSUMERS, STAGES, HOLD)
                middle = end
            acc, step = _multiply(which, acc, smem, bars, middle, tiles_k, step, CONSUMERS, STAGES, HOLD)

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


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "tiles_k", "group", "half", "tokens", "splits", "slot_rows",
                              "nowhere", "line"])  # fmt: skip
def linear_kernel(
    x_desc, weight_desc, out_desc, b_desc, h_ptr, slots_ptr, places_ptr, used_ptr, present_ptr,
    tiles_m, tiles_n, tiles_k, group, half, tokens, splits, slot_rows, nowhere, line, low_columns,
    GATED: gl.constexpr, ADD: gl.constexpr, RANK: gl.constexpr, RUNS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HOLD_B: gl.constexpr = 0,
):  # fmt: skip
    """RANK, of adapters that gated products have a share of, else 0: then all from b_desc to present_ptr, and the last
    six numbers, are not looked at. RUNS: what makes h does still. HOLD_B, of tests: by how many nanoseconds each
    product of the second consumer is held up."""
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
    low, slots = tiles, tiles  # of nobody
    if RANK > 0:
        low = (h_ptr, slots_ptr, places_ptr, used_ptr, tokens, splits, low_columns)  # type: ignore[assignment]
        slots = (present_ptr, line, slot_rows, nowhere)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (A, out_desc, b_desc, low, slots, smem, bars, tiles, GATED, ADD, RANK, RUNS, CONSUMERS, STAGES, 0),
                ),
                (
                    _consume,
                    (B, out_desc, b_desc, low, slots, smem, bars, tiles, GATED, ADD, RANK, RUNS, CONSUMERS, STAGES,
                     HOLD_B),
                ),
                (
                    _produce,
                    (x_desc, weight_desc, out_desc, b_desc, slots, smem, bars, tiles, half, GATED, ADD, RANK, CONSUMERS,
                     STAGES),
                ),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (A, out_desc, b_desc, low, slots, smem, bars, tiles, GATED, ADD, RANK, RUNS, CONSUMERS, STAGES, 0),
                ),
                (
                    _produce,
                    (x_desc, weight_desc, out_desc, b_desc, slots, smem, bars, tiles, half, GATED, ADD, RANK, CONSUMERS,
                     STAGES),
                ),
            ],
            [1],
            [40],
        )  # fmt: skip
