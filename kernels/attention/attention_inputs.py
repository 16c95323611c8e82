"""What attention is told beside the query: the paged cache, whose tokens the query's are, and how scores are made.

The first and the last belong to a layer and are made once; a batch is made once a step, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A layer's keys and values in blocks of `page` tokens, and the blocks of each row of requests.

    keys [num_blocks, page, KV, D], values [num_blocks, page, KV, Dv]: only the last dimensions need to be contiguous,
    and values may be a view of keys. block_table int32 [num_rows, max_blocks]: the token at position p of the request
    in row r lies at offset p % page of block block_table[r, p // page].
    key_scales and value_scales fp32 [num_blocks, page, KV], both or neither: keys and values are codes of a float8 type
    (kv_fp8.py).
    """

    keys: Tensor
    values: Tensor
    block_table: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """B requests with the same few query tokens each: request b's are query[b * query_len:(b + 1) * query_len].

    rows int32 [B]: of the block table. seq_lens int32 [B]: context length including the query tokens; query token j
    stands at position seq_len - query_len + j and sees positions up to its own. The result of one at a negative
    position is zero. seq_len 0 marks a padding row: nothing is written for it, its rows of the result keep what they
    held. They may be somebody else's: the tokens of prompts are packed behind the real decodes.
    """

    rows: Tensor
    seq_lens: Tensor
    query_len: int = 1


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """B requests with any numbers of query tokens: prompts, or chunks of them.

    query_start int32 [B + 1], non-decreasing: request b's are query[query_start[b]:query_start[b + 1]], the last tokens
    of its context. Tokens outside all ranges (padding behind, decodes before) are neither read nor written: their rows
    of the result keep what they held. rows and seq_lens as in UniformBatch.
    max_query_len: the longest of these ranges, or any bound above it; 0: there is none.
    """

    rows: Tensor
    seq_lens: Tensor
    query_start: Tensor
    max_query_len: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a query's scores are made of its products with keys.

    scale > 0 multiplies them. window: 0 for none, else a query at position q sees only keys at p > q - window.
    soft_cap: 0 for none, else scores become cap * tanh(score / cap). sinks [H]: an extra logit a head in the softmax's
    denominator (attention sinks, arXiv 2309.17453, as learned in GPT-OSS).
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None


def neighbouring_pages(count: int, device: torch.device | str) -> Tensor:
    """A block table, int32 [count, count], of requests whose pages are neighbours: row r is r, r + 1, r + 2, …, and a
    request's row is its first page."""
    return torch.arange(2 * count, dtype=torch.int32, device=device).as_strided((count, count), (1, 1))
