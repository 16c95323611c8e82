"""Prefill attention on Hopper GPUs: what the kernel in attention_prefill_gluon.py can do, and its launch."""

import torch
from torch import Tensor

from ..launch.pdl import launched_plainly
from ..launch.tma import descriptor, num_processors
from .attention_parts import LOG2E, PagedCache, RaggedBatch, Scoring
from .attention_prefill_gluon import CHUNK, HALF, ROWS, SIZE, prefill_hopper_kernel
from .prefill_work import PrefillWork


def takes(num_heads: int, num_kv_heads: int, key_size: int, value_size: int, page: int) -> bool:
    """Whether the kernel was made for attention of these sizes."""
    return (
        key_size == value_size == SIZE.value
        and page % CHUNK.value == 0
        and num_heads // num_kv_heads in (1, 2, 4, 8, 16)
    )


def supports(query: Tensor, cache: PagedCache, scoring: Scoring, out: Tensor | None = None) -> bool:
    """Whether `prefill_attention_hopper` can do this; the arguments are those of `prefill_attention`."""
    keys, values = cache.keys, cache.values
    _, num_heads, size = query.shape
    _, page, num_kv_heads, _ = keys.shape
    return (
        takes(num_heads, num_kv_heads, size, values.shape[3], page)
        and cache.key_scales is None
        and query.is_cuda
        and not scoring.window
        and not scoring.soft_cap
        and scoring.sinks is None
        and keys.shape == values.shape
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == keys.dtype == values.dtype
        and query.stride()[1:] == (size, 1)
        and query.stride(0) % 8 == 0  # 16 bytes, as TMA wants it
        and query.data_ptr() % 16 == 0
        and (out is None or (out.stride()[1:] == (size, 1) and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0))
        and _block_rows(keys) > 0
        and _block_rows(values) == _block_rows(keys)
        and num_processors(query.device) > 0
    )


def _block_rows(pages: Tensor) -> int:
    """How many rows of a token's heads lie between a block's beginning and the next one's; 0 where TMA cannot take them
    for one matrix. With pages of several layers in a block, there are more than it has tokens."""
    block, slot, head, element = pages.stride()
    row = pages.shape[2] * pages.shape[3]
    if (slot, head, element) != (row, pages.shape[3], 1) or block % row or pages.data_ptr() % 16:
        return 0
    return block // row


def prefill_attention_hopper(
    query: Tensor,
    cache: PagedCache,
    batch: RaggedBatch,
    scoring: Scoring,
    *,
    work: PrefillWork | None = None,
    out: Tensor | None = None,
    programs: int | None = None,
    others: int = 0,
    dependent: bool = False,
) -> Tensor:
    """`prefill_attention` (see attention.py) where `supports` says so.

    programs: by default one a multiprocessor. They share the work with `others`, those of a second call with the same
    arguments, which may run at the same time: all is done when both have ended. dependent: begins when the programs of
    the kernel before it have, without waiting for their end (attention_beside.py).
    """
    keys, values, block_table = cache.keys, cache.values, cache.block_table
    num_tokens, num_heads, size = query.shape
    num_blocks, page, num_kv_heads, _ = keys.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, size)
    if len(batch.rows) == 0 or num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    table = (work or PrefillWork(batch)).table(group, num_tokens)
    box = min(2 * ROWS.value // group, ROWS.value)
    block_rows, columns = _block_rows(keys), num_kv_heads * size
    slots = (num_blocks - 1) * block_rows + page
    programs = programs or num_processors(query.device)
    if not dependent:
        launched_plainly(query.device)
    prefill_hopper_kernel[(programs,)](
        descriptor(query.data_ptr(), query.dtype, num_tokens, num_heads * size, query.stride(0), box, HALF.value),
        descriptor(keys.data_ptr(), keys.dtype, slots, columns, columns, CHUNK.value, HALF.value),
        descriptor(values.data_ptr(), values.dtype, slots, columns, columns, CHUNK.value, HALF.value),
        out, table, programs + others - 1, block_table, block_table.stride(0), block_rows, out.stride(0),
        float(scoring.scale) * LOG2E.value,
        KV_HEADS=num_kv_heads, GROUP=group, PAGE=page, BLOCK_N=128, STAGES=2, QUERY_STAGES=2, num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out
