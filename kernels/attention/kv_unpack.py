"""Cached keys and values of 8 bits, unpacked for the kernel that reads pages by TMA: attention_prefill_hopper.py.

What a step's prompts have cached is decoded once a layer into pages of a scratch that all layers share. Against what
attention then does with it this is little: 8k tokens of 8 heads of 128 are 50 MB of traffic. Where a step's prompts
have more than the scratch holds, which only the device knows when a CUDA graph is replayed, that kernel gets prompts
without a token, and the Triton kernel, which reads codes, gets them all; otherwise it is the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_parts import PagedCache, RaggedBatch, Scoring, neighbouring_pages
from .attention_prefill import prefill_attention_triton
from .kv_fp8 import as_numbers, decode
from .prefill_work import PrefillWork

ROWS = 64  # of a tile: tokens x KV heads
PROGRAMS = 1056  # eight on each multiprocessor of an H200, whatever there is to do


@dataclass(frozen=True)
class PromptPages:
    """The scratch: numbers of `num_blocks` blocks of `page` tokens, of keys, then of values."""

    numbers: Tensor  # flat
    page: int
    num_blocks: int
    table: Tensor  # neighbouring_pages

    @classmethod
    def create(
        cls, num_tokens: int, page: int, token_elements: int, dtype: torch.dtype, device: torch.device | str
    ) -> PromptPages:
        """token_elements: of keys and values of a token, in the layer that has the most."""
        blocks = -(-num_tokens // page)
        numbers = torch.empty(blocks * page * token_elements, dtype=dtype, device=device)
        return cls(numbers, page, blocks, neighbouring_pages(blocks, device))

    def like(self, cache: PagedCache) -> PagedCache:
        """The pages of a layer with this cache, which every layer overwrites."""
        key_shape, value_shape = ((self.num_blocks, *codes.shape[1:]) for codes in (cache.keys, cache.values))
        num_keys, num_values = math.prod(key_shape), math.prod(value_shape)
        keys, values = self.numbers[: num_keys + num_values].split([num_keys, num_values])
        return PagedCache(keys.view(key_shape), values.view(value_shape), self.table)


@dataclass(slots=True)
class UnpackedPrompts:
    """The prompts of a step, and where their pages lie in the scratch: the same for all layers.

    inside: as the kernel that reads the scratch is told of them; outside: as the one that reads codes is. Of these, one
    has no tokens. outside is None where all prompts fit however long they are.
    """

    prompts: RaggedBatch
    pages: PromptPages
    max_blocks: int  # of a request
    places: Tensor = field(init=False)
    inside: RaggedBatch = field(init=False)
    outside: RaggedBatch | None = field(init=False)
    work: PrefillWork = field(init=False)
    last_work: PrefillWork = field(init=False)

    def __post_init__(self) -> None:
        prompts, count = self.prompts, len(self.prompts.rows)
        self.places = place_prompts(prompts, self.pages.page, self.pages.num_blocks)
        rows, inside, outside = self.places
        self.inside = RaggedBatch(rows[:count], prompts.seq_lens, inside, prompts.max_query_len)
        fits = count * self.max_blocks <= self.pages.num_blocks
        self.outside = None if fits else RaggedBatch(prompts.rows, prompts.seq_lens, outside, prompts.max_query_len)
        self.work, self.last_work = PrefillWork(self.inside), PrefillWork(self.inside, last_only=True)

    def unpack(self, cache: PagedCache) -> PagedCache:
        """This layer's pages, written; the block table is that of `inside`."""
        numbers = self.pages.like(cache)
        unpack_pages(cache, self.prompts, self.places[0], numbers)
        return numbers

    def attend_outside(self, query: Tensor, cache: PagedCache, scoring: Scoring, out: Tensor) -> None:
        """`prefill_attention` of what did not fit. With one tile for all, or requests would meet a kernel that is yet
        to be compiled."""
        if self.outside is not None:
            prefill_attention_triton(
                query, cache, self.outside, scoring, out=out, block_m=64, block_n=64, num_warps=4, num_stages=3
            )


def place_prompts(batch: RaggedBatch, page: int, num_blocks: int) -> Tensor:
    """→ int32 [3, B + 1]: the first page of each request in a scratch of `num_blocks`, and behind them how many pages
    there are in all, 0 where they do not fit; query_start if they fit, and if they do not; else without a token."""
    return (place_prompts_triton if batch.rows.is_cuda else place_prompts_torch)(batch, page, num_blocks)


def place_prompts_torch(batch: RaggedBatch, page: int, num_blocks: int) -> Tensor:
    places = batch.rows.new_zeros(3, len(batch.rows) + 1)
    places[0, 1:] = ((batch.seq_lens + page - 1) // page).cumsum(0)
    fits = places[0, -1] <= num_blocks
    places[1] = torch.where(fits, batch.query_start, batch.query_start[0])
    places[2] = torch.where(fits, batch.query_start[0], batch.query_start)
    places[0, -1] *= fits
    return places


def place_prompts_triton(batch: RaggedBatch, page: int, num_blocks: int) -> Tensor:
    count = len(batch.rows)
    places = torch.empty(3, count + 1, dtype=torch.int32, device=batch.rows.device)
    _place_kernel[(1,)](
        places, batch.seq_lens, batch.query_start, count, num_blocks, places.stride(0),
        PAGE=page, REQUESTS_PAD=_padded(count),
    )  # fmt: skip
    return places


def unpack_pages(cache: PagedCache, batch: RaggedBatch, places: Tensor, numbers: PagedCache) -> None:
    """Decodes the pages of `batch` in `cache` to where `places`, place_prompts' first line, has them in `numbers`:
    contiguous pages of the same shape. What lies behind a request's last token is decoded too."""
    (unpack_pages_triton if batch.rows.is_cuda else unpack_pages_torch)(cache, batch, places, numbers)


def unpack_pages_torch(cache: PagedCache, batch: RaggedBatch, places: Tensor, numbers: PagedCache) -> None:
    firsts, page = places.tolist(), cache.keys.shape[1]
    if not firsts[-1]:
        return
    for row, length, first in zip(batch.rows.tolist(), batch.seq_lens.tolist(), firsts[:-1], strict=True):
        blocks = cache.block_table[row, : -(-length // page)].long()
        for codes, scales, into in (
            (cache.keys, cache.key_scales, numbers.keys),
            (cache.values, cache.value_scales, numbers.values),
        ):
            assert scales is not None
            into[first : first + len(blocks)] = decode(codes[blocks], scales[blocks], into.dtype)


def unpack_pages_triton(cache: PagedCache, batch: RaggedBatch, places: Tensor, numbers: PagedCache) -> None:
    keys, values, key_scales, value_scales = cache.keys, cache.values, cache.key_scales, cache.value_scales
    assert key_scales is not None and value_scales is not None
    _, page, num_kv_heads, key_size = keys.shape
    heads = triton.next_power_of_2(num_kv_heads)
    tokens = max(1, min(page, ROWS // heads))
    _unpack_kernel[(PROGRAMS,)](
        numbers.keys, numbers.values, keys, values, key_scales, value_scales, cache.block_table, batch.rows, places,
        len(batch.rows), cache.block_table.stride(0), *keys.stride()[:3], *values.stride()[:3],
        *key_scales.stride(), *value_scales.stride(),
        PAGE=page, HEADS=num_kv_heads, HEADS_PAD=heads, TOKENS=tokens, KEY_SIZE=key_size,
        KEY_PAD=triton.next_power_of_2(key_size), VALUE_SIZE=values.shape[3],
        VALUE_PAD=triton.next_power_of_2(values.shape[3]), REQUESTS_PAD=_padded(len(batch.rows)), num_warps=4,
    )  # fmt: skip


def _padded(count: int) -> int:
    """Of few different numbers of requests, or every one would be a kernel of its own."""
    return 64 if count <= 64 else max(1024, triton.next_power_of_2(count))


@triton.jit(
    do_not_specialize=["num_requests", "stride_places"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_ptr"],
)
def _place_kernel(
    places_ptr, seq_lens_ptr, query_start_ptr, num_requests, num_blocks, stride_places,
    PAGE: tl.constexpr, REQUESTS_PAD: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, REQUESTS_PAD)
    exists = index < num_requests
    counts = (tl.load(seq_lens_ptr + index, mask=exists, other=0) + PAGE - 1) // PAGE
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    fits = total <= num_blocks
    tl.store(places_ptr + index, ends - counts, mask=exists)
    tl.store(places_ptr + num_requests, tl.where(fits, total, 0))
    nothing = tl.load(query_start_ptr)
    start = tl.load(query_start_ptr + index, mask=exists, other=0)
    last = tl.load(query_start_ptr + num_requests)
    tl.store(places_ptr + stride_places + index, tl.where(fits, start, nothing), mask=exists)
    tl.store(places_ptr + stride_places + num_requests, tl.where(fits, last, nothing))
    tl.store(places_ptr + 2 * stride_places + index, tl.where(fits, nothing, start), mask=exists)
    tl.store(places_ptr + 2 * stride_places + num_requests, tl.where(fits, nothing, last))


@triton.jit
def _decoded(
    out_ptr, code_ptr, scale_ptr, page, first_token, stride_slot, stride_head, stride_scale_slot, stride_scale_head,
    PAGE: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Some tokens of a page; code_ptr and scale_ptr are the page's."""
    row = tl.arange(0, TOKENS * HEADS_PAD)
    slot = first_token + row // HEADS_PAD
    head = row % HEADS_PAD
    column = tl.arange(0, PAD)
    exists = (slot < PAGE) & (head < HEADS)
    mask = exists[:, None] & (column < SIZE)[None, :]
    codes = tl.load(code_ptr + (slot * stride_slot + head * stride_head)[:, None] + column[None, :], mask=mask)
    scales = tl.load(scale_ptr + slot * stride_scale_slot + head * stride_scale_head, mask=exists, other=0.0)
    numbers = as_numbers(codes, tl.float32) * scales[:, None]
    place = (page.to(tl.int64) * PAGE + slot) * HEADS + head
    tl.store(out_ptr + (place * SIZE)[:, None] + column[None, :], numbers.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_requests", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "places_ptr"],
)
def _unpack_kernel(
    key_out_ptr, value_out_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, rows_ptr, places_ptr,
    num_requests, stride_table, stride_key_block, stride_key_slot, stride_key_head,
    stride_value_block, stride_value_slot, stride_value_head,
    stride_key_scale_block, stride_key_scale_slot, stride_key_scale_head,
    stride_value_scale_block, stride_value_scale_slot, stride_value_scale_head,
    PAGE: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, TOKENS: tl.constexpr, KEY_SIZE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, REQUESTS_PAD: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (PAGE + TOKENS - 1) // TOKENS
    index = tl.arange(0, REQUESTS_PAD)
    firsts = tl.load(places_ptr + index, mask=index < num_requests, other=1 << 30)
    num_tiles = tl.load(places_ptr + num_requests) * TILES
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        page = tile // TILES
        first_token = tile % TILES * TOKENS
        request = tl.sum((firsts <= page).to(tl.int32), 0) - 1
        first = tl.load(places_ptr + request)
        row = tl.load(rows_ptr + request).to(tl.int64)
        block = tl.load(table_ptr + row * stride_table + page - first).to(tl.int64)
        _decoded(
            key_out_ptr, key_ptr + block * stride_key_block, key_scale_ptr + block * stride_key_scale_block, page,
            first_token, stride_key_slot, stride_key_head, stride_key_scale_slot, stride_key_scale_head,
            PAGE, HEADS, HEADS_PAD, TOKENS, KEY_SIZE, KEY_PAD,
        )  # fmt: skip
        _decoded(
            value_out_ptr, value_ptr + block * stride_value_block, value_scale_ptr + block * stride_value_scale_block,
            page, first_token, stride_value_slot, stride_value_head, stride_value_scale_slot, stride_value_scale_head,
            PAGE, HEADS, HEADS_PAD, TOKENS, VALUE_SIZE, VALUE_PAD,
        )  # fmt: skip
