"""The Gluon kernel behind attention_prefill_hopper.py: warp-specialised, persistent, pages fetched by TMA.

At most one program a multiprocessor: two consumer warpgroups with 64 rows each of a tile of 128 (query tokens x grouped
heads), and a producer warp that runs ahead of them into the next item, a line of the work table (prefill_work.py) and a
KV head; programs take items until none is left. As in FlashAttention-3 (arXiv 2407.08608), a consumer's softmax runs
beside its product with the values before.
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
from triton.language.extra.cuda import gdc_launch_dependents

from .attention_parts import LOWEST
from .prefill_work import BLOCK_M, LINE

SIZE = gl.constexpr(128)  # of a head
ROWS = gl.constexpr(BLOCK_M // 2)  # of a consumer
CHUNK = gl.constexpr(16)  # keys that one TMA box brings: a page holds a multiple of it
HALF = gl.constexpr(64)  # columns of a swizzled row of shared memory: a tile is two halves, one behind the other
_LINE = gl.constexpr(LINE)
# Of a line of the work table; a KV head joins it on its way to the consumers.
ROW, TOKEN, POSITION, NUM_TOKENS, SEQ_LEN, HEAD = (gl.constexpr(i) for i in range(6))


@gluon.jit
def _take(work_ptr, num_items, KV_HEADS: gl.constexpr, layout: gl.constexpr):
    """The next item that no program has taken yet → its KV head, -1 when there is none, and its line of the table."""
    item = gl.atomic_add(work_ptr + 1, 1, sem="relaxed")
    line = work_ptr + (1 + gl.minimum(item, num_items - 1) // KV_HEADS) * _LINE
    head = gl.where(item < num_items, item % KV_HEADS, -1)
    return head, gl.load(line + gl.arange(0, _LINE, layout=layout))


@gluon.jit
def _entry(line, index: gl.constexpr):
    """One number of a line that every thread has whole."""
    return gl.sum(gl.where(gl.arange(0, _LINE, layout=line.type.layout) == index, line, 0), 0)


@gluon.jit
def _num_tiles(position, num_tokens, BLOCK_N: gl.constexpr):
    """Tiles of keys up to the last token's own."""
    return gl.maximum((position + num_tokens + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _produce(
    descs, smem, query_bars, key_bars, value_bars, work_ptr, num_others, table_ptr, stride_table, block_rows,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    query_desc, key_desc, value_desc = descs
    item_smem, query_smem, key_smem, value_smem = smem
    query_full, query_empty = query_bars
    BLOCK_Q: gl.constexpr = 2 * ROWS // GROUP
    BOX_Q: gl.constexpr = query_desc.block_type.shape[0]
    BOXES: gl.constexpr = ROWS // BOX_Q
    CHUNKS: gl.constexpr = BLOCK_N // CHUNK
    layout: gl.constexpr = key_desc.layout
    # The same memory as the boxes that TMA fills, some rows of one half each.
    query_boxes = query_smem._reinterpret(query_desc.dtype, [QUERY_STAGES * 4 * BOXES, BOX_Q, HALF], layout)
    key_boxes = key_smem._reinterpret(key_desc.dtype, [STAGES * 2 * CHUNKS, CHUNK, HALF], layout)
    value_boxes = value_smem._reinterpret(value_desc.dtype, [STAGES * 2 * CHUNKS, CHUNK, HALF], layout)

    line_layout: gl.constexpr = gl.BlockedLayout([_LINE], [32], [1], [0])
    num_items = gl.load(work_ptr) * KV_HEADS
    head, line = _take(work_ptr, num_items, KV_HEADS, line_layout)
    turn = 0
    step = 0
    while head >= 0:
        row, token, position = _entry(line, ROW), _entry(line, TOKEN), _entry(line, POSITION)
        num_tokens, seq_len = _entry(line, NUM_TOKENS), _entry(line, SEQ_LEN)
        # Row r of the tile is head r // BLOCK_Q of this KV head's group, token r % BLOCK_Q of the block. Rows behind
        # the block's last token come from whatever token is there.
        stage = turn % QUERY_STAGES
        mbarrier.wait(query_empty.index(stage), (turn // QUERY_STAGES + 1) & 1)
        is_head = gl.arange(0, _LINE, layout=line_layout) == HEAD
        item_smem.index(stage).store(gl.where(is_head, head, line))
        mbarrier.expect(query_full.index(stage), 2 * ROWS * SIZE * 2)
        for box in gl.static_range(2 * BOXES):
            column = (head * GROUP + box * BOX_Q // BLOCK_Q) * SIZE
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    query_desc, [token + box * BOX_Q % BLOCK_Q, column + half * HALF], query_full.index(stage),
                    query_boxes.index(stage * (4 * BOXES) + (box // BOXES * 2 + half) * BOXES + box % BOXES),
                )  # fmt: skip

        # Taken early, so that what it answers is there when the next item begins.
        next_head, line = _take(work_ptr, num_items, KV_HEADS, line_layout)
        table_row_ptr = table_ptr + row.to(gl.int64) * stride_table
        num_chunks = (seq_len + CHUNK - 1) // CHUNK
        num_tiles = _num_tiles(position, num_tokens, BLOCK_N)
        for back in range(num_tiles):
            # Behind the last key comes the first chunk once more: what was never written may be NaN, which a weight of
            # zero does not silence. The page numbers are read before the wait for a free stage.
            slots = ()
            for i in gl.static_range(CHUNKS):
                chunk = (num_tiles - 1 - back) * CHUNKS + i
                key = gl.where(chunk < num_chunks, chunk, 0) * CHUNK
                slots += (gl.load(table_row_ptr + key // PAGE) * block_rows + key % PAGE,)  # type: ignore[assignment]
            stage = step % STAGES
            phase = (step // STAGES + 1) & 1
            _fetch(key_desc, slots, head, key_boxes, key_bars, stage, phase, CHUNKS)
            _fetch(value_desc, slots, head, value_boxes, value_bars, stage, phase, CHUNKS)
            step += 1
        head = next_head
        turn += 1

    stage = turn % QUERY_STAGES
    mbarrier.wait(query_empty.index(stage), (turn // QUERY_STAGES + 1) & 1)
    item_smem.index(stage).store(gl.full([_LINE], -1, gl.int32, line_layout))
    mbarrier.arrive(query_full.index(stage), count=1)
    # The last program leaves the table as it found it, for the next layer.
    if gl.atomic_add(work_ptr + 2, 1) == num_others:
        gl.store(work_ptr + 1, 0)
        gl.store(work_ptr + 2, 0)


@gluon.jit
def _fetch(desc, slots, head, boxes, bars, stage, phase, CHUNKS: gl.constexpr):
    """A tile of one head's keys or values into a stage, once both consumers are done with what it held."""
    full, empty = bars
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), CHUNKS * CHUNK * SIZE * 2)
    for i in gl.static_range(CHUNKS):
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                desc, [slots[i], head * SIZE + half * HALF], full.index(stage),
                boxes.index((stage * 2 + half) * CHUNKS + i),
            )  # fmt: skip


@gluon.jit
def _consume(
    which: gl.constexpr, smem, query_bars, key_bars, value_bars, out_ptr, stride_out_token, exp_scale,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    item_smem, query_smem, key_smem, value_smem = smem
    query_full, query_empty = query_bars
    key_full, key_empty = key_bars
    value_full, value_empty = value_bars
    BLOCK_Q: gl.constexpr = 2 * ROWS // GROUP
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    # A warp writes the rows that it has in the accumulator, and neighbouring lanes write neighbouring columns.
    out_layout: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0])
    score_row = which * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))
    key_column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
    out_row = which * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    out_column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, out_layout))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)

    line_layout: gl.constexpr = gl.BlockedLayout([_LINE], [32], [4], [0])
    mbarrier.wait(query_full.index(0), 0)
    line = item_smem.index(0).load(line_layout)
    head = _entry(line, HEAD)
    turn = 0
    step = 0
    while head >= 0:
        token, position = _entry(line, TOKEN), _entry(line, POSITION)
        num_tokens, seq_len = _entry(line, NUM_TOKENS), _entry(line, SEQ_LEN)
        # Tiles are taken from the last to the first; all of a whole tile's keys are seen by every row.
        num_tiles = _num_tiles(position, num_tokens, BLOCK_N)
        num_whole = gl.maximum(gl.minimum((position + 1) // BLOCK_N, num_tiles - 1), 0)
        tile_start = (num_tiles - 1) * BLOCK_N
        row_position = position + score_row % BLOCK_Q
        query_stage = turn % QUERY_STAGES
        query = query_smem.index(query_stage * 2 + which)

        mbarrier.wait(key_full.index(step % STAGES), step // STAGES & 1)
        scores = warpgroup_mma(
            query, key_smem.index(step % STAGES).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_empty.index(step % STAGES), count=1)
        scores = gl.where(tile_start + key_column[None, :] <= row_position[:, None], scores, float("-inf"))
        running_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, score_layout))
        running_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, score_layout))
        weights, running_max, running_sum, _ = _softmax(scores, running_max, running_sum, exp_scale)
        weights = gl.convert_layout(weights.to(query.dtype), weight_layout)
        acc = gl.zeros([ROWS, SIZE], gl.float32, acc_layout)
        if (tile_start + BLOCK_N > seq_len) & ((seq_len % CHUNK != 0) | (seq_len <= 0)):
            mbarrier.wait(value_full.index(step % STAGES), step // STAGES & 1)
            _clean(value_smem, step % STAGES, tile_start, seq_len, BLOCK_N)
            fence_async_shared()
        step += 1

        for _ in range(num_tiles - 1 - num_whole):
            tile_start -= BLOCK_N
            acc, weights, running_max, running_sum = _step(
                step, query, key_smem, value_smem, key_bars, value_bars, acc, weights, running_max,
                running_sum, exp_scale, row_position - tile_start, key_column, no_scores, True, STAGES,
            )  # fmt: skip
            step += 1
        for _ in range(num_whole):
            acc, weights, running_max, running_sum = _step(
                step, query, key_smem, value_smem, key_bars, value_bars, acc, weights, running_max,
                running_sum, exp_scale, row_position, key_column, no_scores, False, STAGES,
            )  # fmt: skip
            step += 1

        last = (step - 1) % STAGES
        mbarrier.wait(value_full.index(last), (step - 1) // STAGES & 1)
        acc = warpgroup_mma(weights, value_smem.index(last), acc)
        mbarrier.arrive(value_empty.index(last), count=1)
        total = gl.convert_layout(running_sum, gl.SliceLayout(1, acc_layout))
        acc *= (1.0 / gl.where(total > 0, total, 1.0))[:, None]
        # Through this consumer's half of the query's buffer, so that rows are written in whole sectors.
        query.store(acc.to(query.dtype))
        result = query.load(out_layout)
        fence_async_shared()
        mbarrier.arrive(query_empty.index(query_stage), count=1)
        out_token = (token + out_row % BLOCK_Q).to(gl.int64)
        out_offset = out_token * stride_out_token + (head * GROUP + out_row // BLOCK_Q) * SIZE
        exists = out_row % BLOCK_Q < num_tokens
        gl.store(out_ptr + out_offset[:, None] + out_column[None, :], result, mask=exists[:, None])
        turn += 1
        mbarrier.wait(query_full.index(turn % QUERY_STAGES), turn // QUERY_STAGES & 1)
        line = item_smem.index(turn % QUERY_STAGES).load(line_layout)
        head = _entry(line, HEAD)


@gluon.jit
def _step(
    step, query, key_smem, value_smem, key_bars, value_bars, acc, weights, running_max, running_sum, exp_scale,
    last_column, key_column, no_scores, MASK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """This tile's scores, then the product of the tile before, beside which this tile's softmax runs."""
    key_full, key_empty = key_bars
    value_full, value_empty = value_bars
    stage = step % STAGES
    before = (step - 1) % STAGES
    before_phase = (step - 1) // STAGES & 1
    mbarrier.wait(key_full.index(stage), step // STAGES & 1)
    scores = warpgroup_mma(query, key_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(value_full.index(before), before_phase)
    acc = warpgroup_mma(weights, value_smem.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_empty.index(stage), count=1)
    if MASK:
        scores = gl.where(key_column[None, :] <= last_column[:, None], scores, float("-inf"))
    new_weights, running_max, running_sum, decay = _softmax(scores, running_max, running_sum, exp_scale)
    # Passed at once, this wait is here for its branch: within one basic block ptxas moves the wait for the product
    # ahead of the softmax that is to run beside it.
    mbarrier.wait(value_full.index(before), before_phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(value_empty.index(before), count=1)
    acc *= gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    return acc, weights, running_max, running_sum


@gluon.jit
def _softmax(scores, running_max, running_sum, exp_scale):
    """→ weights, maximum, sum, and the factor of what was summed before. exp_scale: the scores' own times log2(e)."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * exp_scale)
    decay = gl.exp2(running_max - new_max)
    weights = gl.exp2(scores * exp_scale - new_max[:, None])
    return weights, new_max, running_sum * decay + gl.sum(weights, 1), decay


@gluon.jit
def _clean(value_smem, stage, tile_start, seq_len, BLOCK_N: gl.constexpr):
    """Zeroes the tile's rows behind the last key, in its last chunk: the page holds what was there before, even NaN.

    Both consumers do so, with the same result. A context shorter than a chunk has that chunk all over the tile.
    """
    CHUNKS: gl.constexpr = BLOCK_N // CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    boxes = value_smem._reinterpret(
        value_smem.dtype, [value_smem.shape[0] * 2 * CHUNKS, CHUNK, HALF], value_smem.layout
    )
    is_short = seq_len < CHUNK
    first = gl.where(is_short, 0, (seq_len - tile_start) // CHUNK)
    last = gl.where(is_short, CHUNKS, first + 1)
    num_rows = gl.where(is_short, seq_len, seq_len % CHUNK)
    exists = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout)) < num_rows
    for chunk in range(first, last):
        for half in gl.static_range(2):
            box = boxes.index((stage * 2 + half) * CHUNKS + chunk)
            box.store(gl.where(exists[:, None], box.load(layout), 0.0))


@gluon.jit(do_not_specialize=["num_others", "stride_table", "block_rows"], do_not_specialize_on_alignment=["table_ptr"])
def prefill_hopper_kernel(
    query_desc, key_desc, value_desc, out_ptr, work_ptr, num_others, table_ptr, stride_table, block_rows,
    stride_out_token, exp_scale, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()  # attention_beside.py has a kernel that begins now; all others wait for this one's end
    layout: gl.constexpr = key_desc.layout
    smem = (
        gl.allocate_shared_memory(gl.int32, [QUERY_STAGES, _LINE], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(query_desc.dtype, [QUERY_STAGES * 2, ROWS, SIZE], layout),
        gl.allocate_shared_memory(key_desc.dtype, [STAGES, BLOCK_N, SIZE], layout),
        gl.allocate_shared_memory(value_desc.dtype, [STAGES, BLOCK_N, SIZE], layout),
    )
    query_bars = _full_and_empty(QUERY_STAGES)
    key_bars = _full_and_empty(STAGES)
    value_bars = _full_and_empty(STAGES)
    fence_async_shared()
    A: gl.constexpr = 0
    B: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (A, smem, query_bars, key_bars, value_bars, out_ptr, stride_out_token, exp_scale,
                        GROUP, BLOCK_N, STAGES, QUERY_STAGES)),
            (_consume, (B, smem, query_bars, key_bars, value_bars, out_ptr, stride_out_token, exp_scale,
                        GROUP, BLOCK_N, STAGES, QUERY_STAGES)),
            (_produce, ((query_desc, key_desc, value_desc), smem, query_bars, key_bars, value_bars, work_ptr,
                        num_others, table_ptr, stride_table, block_rows, KV_HEADS, GROUP, PAGE, BLOCK_N,
                        STAGES, QUERY_STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _full_and_empty(STAGES: gl.constexpr):
    """A barrier a stage for the producer to say that it is filled, and one for both consumers that it is free."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return full, empty
