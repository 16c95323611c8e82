"""Prefill attention on Hopper GPUs: what the kernel in attention_prefill_gluon.py can do, and its launch."""

import torch
from torch import Tensor

from .attention_decode import LOG2E
from .attention_prefill_gluon import CHUNK, HALF, ROWS, SIZE, prefill_hopper_kernel
from .prefill_work import PrefillWork
from .tma import descriptor, num_processors


def supports(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> bool:
    """Whether `prefill_attention_hopper` can do this; the arguments are those of `prefill_attention`."""
    _, num_heads, size = query.shape
    _, page, num_kv_heads, _ = key_cache.shape
    return (
        query.is_cuda
        and not window
        and not soft_cap
        and sinks is None
        and size == SIZE.value
        and key_cache.shape == value_cache.shape
        and page % CHUNK.value == 0
        and num_heads // num_kv_heads in (1, 2, 4, 8, 16)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key_cache.dtype == value_cache.dtype
        and query.stride()[1:] == (size, 1)
        and query.stride(0) % 8 == 0  # 16 bytes, as TMA wants it
        and query.data_ptr() % 16 == 0
        and (out is None or (out.stride()[1:] == (size, 1) and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0))
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and num_processors(query.device) > 0
    )


def prefill_attention_hopper(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float,
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
    num_tokens, num_heads, size = query.shape
    num_blocks, page, num_kv_heads, _ = key_cache.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, size)
    if len(rows) == 0 or num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    table = (work or PrefillWork(rows, seq_lens, query_start)).table(group, num_tokens)
    box = min(2 * ROWS.value // group, ROWS.value)
    slots, columns = num_blocks * page, num_kv_heads * size
    programs = programs or num_processors(query.device)
    prefill_hopper_kernel[(programs,)](
        descriptor(query.data_ptr(), query.dtype, num_tokens, num_heads * size, query.stride(0), box, HALF.value),
        descriptor(key_cache.data_ptr(), key_cache.dtype, slots, columns, columns, CHUNK.value, HALF.value),
        descriptor(value_cache.data_ptr(), value_cache.dtype, slots, columns, columns, CHUNK.value, HALF.value),
        out, table, programs + others - 1, block_table, block_table.stride(0), out.stride(0),
        float(scale) * LOG2E.value,
        KV_HEADS=num_kv_heads, GROUP=group, PAGE=page, BLOCK_N=128, STAGES=2, QUERY_STAGES=2, num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out
