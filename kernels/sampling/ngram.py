"""Drafts by n-grams: where a request's last tokens stood before, what came then is likely to come now.

Prompt lookup decoding (Saxena 2023), on the device: every position of the history is compared, which for 64 requests of
32k tokens reads 8 MB, some microseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.history import History, load_tokens, page_places

_BLOCK = 1024
_PLACES = tl.constexpr(1 << 26)  # a score is the length of a match times this, and the position behind it
MAX_NGRAM = 15


def propose_ngrams(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, sample_index: torch.Tensor,
    num_proposed: torch.Tensor, found: torch.Tensor, min_ngram: int, max_ngram: int, num_drafts: int,
) -> None:  # fmt: skip
    """Writes num_drafts tokens behind the history of each request with sample_index[i] ≥ 0.

    The tables: a History, num_computed and num_proposed int32 [R + 1]. rows, sample_index and found int32 [B]. A
    request has num_computed[row] + 1 tokens. Of the places where its last n tokens stood before,
    min_ngram ≤ n ≤ max_ngram ≤ 15, the one with the longest match counts, and the latest of these; the drafts are what
    followed, over and over where that is less. Without a match they are the last token. num_proposed[row] and found[i]
    become num_drafts where there is a match, else 0; other requests get 0 in found and keep the rest. The drafts
    go to the row's ring; nothing is written at max_len and beyond.
    """
    (propose_ngrams_triton if history.pages.is_cuda else propose_ngrams_torch)(
        history, num_computed, rows, sample_index, num_proposed, found, min_ngram, max_ngram, num_drafts
    )


def propose_ngrams_torch(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, sample_index: torch.Tensor,
    num_proposed: torch.Tensor, found: torch.Tensor, min_ngram: int, max_ngram: int, num_drafts: int,
) -> None:  # fmt: skip
    found.zero_()
    for i, (row, sample) in enumerate(zip(rows.tolist(), sample_index.tolist(), strict=True)):
        if sample < 0:
            continue
        length = int(num_computed[row]) + 1
        tokens = history.tokens(row, length, length - 1)
        holds = torch.ones(length - 1, dtype=torch.bool, device=tokens.device)
        matched = torch.zeros(length - 1, dtype=torch.int64, device=tokens.device)
        for back in range(min(max_ngram, length - 1)):
            holds[back:] &= tokens[: length - 1 - back] == tokens[length - 1 - back]
            holds[:back] = False
            matched += holds
        longest = int(matched.max()) if length > 1 else 0
        drafts = tokens[-1:]
        if longest >= min_ngram:
            start = int((matched == longest).nonzero()[-1]) + 1
            drafts = tokens[start:]
            found[i] = num_drafts
        num_proposed[row] = found[i]
        drafts = drafts.repeat(-(-num_drafts // len(drafts)))[: min(num_drafts, history.max_len - length)]
        history.recent[row, torch.arange(length, length + len(drafts)) % history.ring] = drafts


def propose_ngrams_triton(
    history: History, num_computed: torch.Tensor, rows: torch.Tensor, sample_index: torch.Tensor,
    num_proposed: torch.Tensor, found: torch.Tensor, min_ngram: int, max_ngram: int, num_drafts: int,
) -> None:  # fmt: skip
    count, limit = rows.shape[0], history.max_len
    table = history.table
    if not count:
        return
    best = torch.zeros_like(found)
    _match_kernel[(count, triton.cdiv(limit, _BLOCK))](
        history.pages, table, history.recent, num_computed, rows, sample_index, best, table.stride(0),
        MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, PAGE=history.page, RING=history.ring, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _draft_kernel[(count,)](
        history.pages, table, history.recent, num_computed, rows, sample_index, best, num_proposed, found,
        table.stride(0), limit, num_drafts, PAGE=history.page, RING=history.ring, BLOCK=16,
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _match_kernel(
    pages_ptr, table_ptr, recent_ptr, num_computed_ptr, rows_ptr, sample_index_ptr, best_ptr, table_stride,
    MIN_NGRAM: tl.constexpr, MAX_NGRAM: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    last = tl.load(num_computed_ptr + row)  # the place of the last token
    begin = tl.program_id(1) * BLOCK
    if tl.load(sample_index_ptr + request) < 0 or begin >= last:
        return
    table_ptr += row * table_stride
    place = begin + tl.arange(0, BLOCK)
    holds = place < last
    matched = tl.zeros([BLOCK], tl.int32)
    for back in tl.static_range(MAX_NGRAM):
        holds = holds & (place >= back)
        wanted = load_tokens(
            pages_ptr, table_ptr, recent_ptr + row * RING, tl.maximum(last - back, 0), last, True, PAGE, RING
        )
        token = tl.load(pages_ptr + page_places(table_ptr, place - back, holds, PAGE), mask=holds, other=-1)
        holds = holds & (token == wanted)
        matched += holds.to(tl.int32)
    score = tl.max(tl.where(matched >= MIN_NGRAM, matched * _PLACES + place + 1, 0), 0)
    if score > 0:
        tl.atomic_max(best_ptr + request, score)


@triton.jit(do_not_specialize=["table_stride", "max_len", "num_drafts"])
def _draft_kernel(
    pages_ptr, table_ptr, recent_ptr, num_computed_ptr, rows_ptr, sample_index_ptr, best_ptr,
    num_proposed_ptr, found_ptr, table_stride, max_len, num_drafts, PAGE: tl.constexpr,
    RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    if tl.load(sample_index_ptr + request) < 0:
        tl.store(found_ptr + request, 0)
        return
    row = tl.load(rows_ptr + request).to(tl.int64)
    length = tl.load(num_computed_ptr + row) + 1
    score = tl.load(best_ptr + request)
    start = tl.where(score > 0, score % _PLACES, length - 1)
    place = tl.arange(0, BLOCK)
    ring_ptr = recent_ptr + row * RING
    draft = load_tokens(
        pages_ptr, table_ptr + row * table_stride, ring_ptr, start + place % (length - start), length - 1,
        place < num_drafts, PAGE, RING,
    )  # fmt: skip
    is_there = (place < num_drafts) & (length + place < max_len)
    tl.store(ring_ptr + (length + place) % RING, draft, mask=is_there)
    proposed = tl.where(score > 0, num_drafts, 0)
    tl.store(num_proposed_ptr + row, proposed)
    tl.store(found_ptr + request, proposed)
