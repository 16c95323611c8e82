"""Decode and prefill attention of a step at the same time, on a Hopper GPU.

Decode attention waits for memory: two thirds of the multiprocessors do it as fast as all. So prefill attention gets the
others first, and what it has not done when the decodes end, it does on all. Three launches in a row, each of which
begins as soon as the programs of the one before have (programmatic dependent launch, pdl.py): prefill attention with a
third of the programs, which fill their multiprocessors; decode attention, for which the others are left; prefill
attention with the rest of the programs, which come in where decodes end. The programs of both share one work table.

None waits for the end of the one before. What they read was written before the first of them, which is launched
plainly; what comes after them on the stream is made to wait for each of them, and must not take part itself (pdl.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.pdl import next_launch_is_plain
from .attention_decode import decode_attention_triton
from .attention_parts import DecodeWorkspace, PagedCache, RaggedBatch, Scoring, UniformBatch
from .attention_prefill_hopper import num_processors, prefill_attention_hopper
from .prefill_work import PrefillWork

MIN_DECODES = 32  # fewer end too soon for it to pay
SHARE = 3  # the first launch has one in so many of the multiprocessors


def attend_beside(
    query: Tensor,
    cache: PagedCache,
    decodes: UniformBatch,
    prompts: RaggedBatch,
    scoring: Scoring,
    *,
    workspace: DecodeWorkspace | None,
    work: PrefillWork,
    out: Tensor,
    prompt_cache: PagedCache | None = None,
) -> None:
    """`decode_attention` of `decodes`, whose tokens come first, and `prefill_attention` of `prompts`, where `supports`
    says yes. The arguments are theirs; query and out are of the whole step, work is made of `prompts`. prompt_cache: of
    prompts, where that is not `cache`; nothing that writes it may have been launched as a dependent.

    The overlap is that of a CUDA graph: launched one by one, the three follow each other.
    """
    decode_tokens = len(decodes.rows) * decodes.query_len
    work.table(query.shape[1] // cache.keys.shape[2], len(query))  # made before the first launch, not between them
    stream = torch.cuda.current_stream(query.device)
    share = num_processors(query.device) // SHARE
    rest = num_processors(query.device) - share
    prefill = query, prompt_cache or cache, prompts, scoring
    prefill_attention_hopper(*prefill, work=work, out=out, programs=share, others=rest)
    first = stream.record_event()
    decode_attention_triton(
        query[:decode_tokens], cache, decodes, scoring, workspace=workspace, out=out[:decode_tokens], beside=True
    )
    second = stream.record_event()
    prefill_attention_hopper(*prefill, work=work, out=out, programs=rest, others=share, dependent=True)
    # In a graph the next kernel depends on the last of these alone, unless it is told of the others.
    stream.wait_event(first)
    stream.wait_event(second)
    next_launch_is_plain(query.device)
