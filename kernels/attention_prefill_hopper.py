"""Prefill attention on Hopper GPUs: what the kernel in attention_prefill_gluon.py can do, and its launch."""

import torch
from torch import Tensor

from .attention_decode import LOG2E
from .attention_inputs import PagedCache, RaggedBatch, Scoring
from .attention_prefill_gluon import CHUNK, HALF, ROWS, SIZE, prefill_hopper_kernel
from .pdl import launched_plainly
from .prefill_work import PrefillWork
from .tma import descriptor, num_processors


def supports(query: Tensor, cache: PagedCache, scoring: Scoring, out: Tensor | None = None) -> bool:
    """Whether `prefill_attention_hopper` can do this; the arguments are those of `prefill_attention`."""
    keys, values = cache.keys, cache.values
    _, num_heads, size = query.shape
    _, page, num_kv_heads, _ = keys.shape
    return (
        query.is_cuda
        and not scoring.window
        and not scoring.soft_cap
        and scoring.sinks is None
        and size == SIZE.value
        and keys.shape == values.shape
        and page % CHUNK.value == 0
        and num_heads // num_kv_heads in (1, 2, 4, 8, 16)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == keys.dtype == values.dtype
        and query.stride()[1:] == (size, 1)
        and query.stride(0) % 8 == 0  # 16 bytes, as TMA wants it
        and query.data_ptr() % 16 == 0
        and (out is None or (out.stride()[1:] == (size, 1) and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0))
        and keys.is_contiguous()
        and values.is_contiguous()
        and num_processors(query.device) > 0
    )


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
    slots, columns = num_blocks * page, num_kv_heads * size
    programs = programs or num_processors(query.device)
    if not dependent:
        launched_plainly(query.device)
    prefill_hopper_kernel[(programs,)](
        descriptor(query.data_ptr(), query.dtype, num_tokens, num_heads * size, query.stride(0), box, HALF.value),
        descriptor(keys.data_ptr(), keys.dtype, slots, columns, columns, CHUNK.value, HALF.value),
        descriptor(values.data_ptr(), values.dtype, slots, columns, columns, CHUNK.value, HALF.value),
        out, table, programs + others - 1, block_table, block_table.stride(0), out.stride(0),
        float(scoring.scale) * LOG2E.value,
        KV_HEADS=num_kv_heads, GROUP=group, PAGE=page, BLOCK_N=128, STAGES=2, QUERY_STAGES=2, num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out
