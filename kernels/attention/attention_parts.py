"""What the kernels of attention share: arguments, functions on the device, and splits of a context."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
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
    last_seen int32 [T], beside the query: the position of the last key that each token sees, which is in the cache;
    None: its own. Through a window it sees as far back as without.
    """

    rows: Tensor
    seq_lens: Tensor
    query_start: Tensor
    max_query_len: int
    last_seen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a query's scores are made of its products with keys.

    scale > 0 multiplies them. window: 0 for none, else a query at position q sees only keys at p > q - window.
    soft_cap: 0 for none, else scores become cap * tanh(score / cap). sinks [H]: an extra logit a head in the softmax's
    denominator (attention sinks, arXiv 2309.17453, as learned in GPT-OSS). chunked: the window is that of the positions
    from a multiple of it on: a query at q sees keys at p >= q // window * window.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    chunked: bool = False

    @property
    def reach(self) -> int:
        """The window as kernels are told of it: below 0 where it is chunked."""
        return -self.window if self.chunked else self.window

    def first_seen(self, position: Any) -> Any:
        """The first key that a query at `position`, a number or a tensor of them, sees through the window."""
        return position // self.window * self.window if self.chunked else position - self.window + 1


def neighbouring_pages(count: int, device: torch.device | str) -> Tensor:
    """A block table, int32 [count, count], of requests whose pages are neighbours: row r is r, r + 1, r + 2, …, and a
    request's row is its first page."""
    return torch.arange(2 * count, dtype=torch.int32, device=device).as_strided((count, count), (1, 1))


LOG2E = tl.constexpr(1.4426950408889634)
# The running maximum starts at a finite value, so that a row that has seen no key yet gives exp2(-inf - LOWEST) = 0
# instead of the NaN of exp2(-inf - -inf).
LOWEST = tl.constexpr(-1e30)
LIFT = tl.constexpr(256.0)  # of weights times scales (kv_fp8.py), which are small numbers for fp16


@triton.jit
def soft_cap_scores(scores, cap):
    """cap * tanh(scores / cap), tanh written with exp2 so that it cannot overflow (x -> inf gives 1 - 2/inf)."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / cap))))


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """Scoring.first_seen of Scoring.reach."""
    if WINDOW > 0:
        return position - WINDOW + 1
    else:
        return position // -WINDOW * -WINDOW


@triton.jit
def visible_keys(seq_len, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that any query token of the request sees, and how many there are from there on."""
    first_key = seq_len * 0
    if WINDOW != 0:
        first_key = tl.maximum(first_seen(seq_len - QUERY_LEN, WINDOW), 0)
    return first_key, seq_len - first_key


@triton.jit
def split_size_of(num_keys, num_splits, min_split_tokens, BLOCK_N: tl.constexpr):
    """Keys per split: at least min_split_tokens, a multiple of BLOCK_N, and at most num_splits splits in all."""
    wanted = tl.minimum(tl.maximum(num_keys // min_split_tokens, 1), num_splits)
    blocks = (num_keys + wanted * BLOCK_N - 1) // (wanted * BLOCK_N)
    return tl.maximum(blocks, 1) * BLOCK_N


MAX_SPLITS = 64


@lru_cache
def processors(device: torch.device) -> int:
    # Off the GPU (interpreter tests) the H200's count stands in.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache(maxsize=4096)
def choose_splits(num_requests: int, num_kv_heads: int, num_sms: int, max_context: int) -> tuple[int, int]:
    """How many splits to launch, and the fewest keys worth a split of their own.

    Depends on host constants only, so that a captured CUDA graph stays right for any lengths. Splits are as short as it
    takes for contexts of 1k to fill the card (4 programs an SM), at least 32 keys; longer contexts get more splits, up
    to 8 programs an SM. More would balance uneven lengths better, but surplus programs cost time too. A lone request
    has nothing to balance: two programs on every SM, no more. How many of the splits do work, the kernel decides from
    the request's length.
    """
    programs = num_requests * num_kv_heads
    min_split_tokens = min(max(triton.next_power_of_2(programs * 256 // num_sms), 32), 1024)
    most = max(max_context // min_split_tokens, 1)
    if num_requests == 1:
        return min(max(2 * num_sms // programs, 1), MAX_SPLITS, most), min_split_tokens
    fill = max(6 * num_sms // programs, 1)
    num_splits = min(fill, MAX_SPLITS, most)
    return 1 << (num_splits.bit_length() - 1), min_split_tokens


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch for the partial results of split-KV decoding, made once and used by every layer.

    partial_out: flat fp32, [tokens, heads, splits, value_size] of the call that uses it; partial_lse: the same without
    value_size.
    """

    partial_out: torch.Tensor
    partial_lse: torch.Tensor

    @classmethod
    def create(
        cls,
        max_rows: int,
        num_heads: int,
        value_size: int,
        device: torch.device | str,
        max_query_len: int = 1,
        num_kv_heads: int = 1,
    ) -> DecodeWorkspace:
        """Scratch for decode batches of up to max_rows requests with up to max_query_len query tokens each.

        num_kv_heads may be left at 1, the safe side: fewer KV heads mean more splits.
        """
        device = torch.device(device)
        sms = processors(device)
        splits = [choose_splits(rows, num_kv_heads, sms, 1 << 31)[0] for rows in range(1, max_rows + 1)]
        partials = max((rows * count for rows, count in enumerate(splits, 1) if count > 1), default=0)
        return cls.allocate(partials * max_query_len * num_heads, value_size, device)

    @classmethod
    def allocate(cls, num_partials: int, value_size: int, device: torch.device) -> DecodeWorkspace:
        return cls(
            torch.empty(num_partials * value_size, dtype=torch.float32, device=device),
            torch.empty(num_partials, dtype=torch.float32, device=device),
        )
