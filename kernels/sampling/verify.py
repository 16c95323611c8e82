"""Which drafts hold: those that are what was sampled in their place.

Every position behind a draft is sampled as it would have been without any, with the request's own noise (noise.py). So
a draft that is not what is sampled in its place costs the work behind it, and changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.history import History


def verify_drafts(
    history: History, num_computed: torch.Tensor, num_proposed: torch.Tensor, rows: torch.Tensor,
    query_start: torch.Tensor, sampled: torch.Tensor, sample_index: torch.Tensor, kept: torch.Tensor, num_drafts: int,
) -> None:  # fmt: skip
    """Ends a step for D requests with drafts, which lie behind the tokens that there are.

    The tables: a History, in whose rings the drafts are, num_computed and num_proposed int32 [R + 1]. rows int32 [D]
    and query_start int32 [D + 1]: request i has computed 1 + num_drafts tokens, none if it is padding. Its samples are
    1 + num_drafts entries of sampled int32 [S] from sample_index[i] on, int32 [D]. Those that agree with the drafts,
    one after the other, and the one behind them are its next tokens: they are there then, and num_computed[rows[i]]
    grows by their number, which goes to kept[0, i]. kept[1, i] is num_proposed[rows[i]]; padding has 0 in both. A
    sample at max_len or beyond is dropped. The rows of requests must differ from each other. kept int32 [2, D].
    """
    (verify_drafts_triton if history.pages.is_cuda else verify_drafts_torch)(
        history, num_computed, num_proposed, rows, query_start, sampled, sample_index, kept, num_drafts
    )


def verify_drafts_torch(
    history: History, num_computed: torch.Tensor, num_proposed: torch.Tensor, rows: torch.Tensor,
    query_start: torch.Tensor, sampled: torch.Tensor, sample_index: torch.Tensor, kept: torch.Tensor, num_drafts: int,
) -> None:  # fmt: skip
    kept.zero_()
    for i, (row, length) in enumerate(zip(rows.tolist(), query_start.diff().tolist(), strict=True)):
        if not length:
            continue
        first, begin = int(num_computed[row]) + 1, int(sample_index[i])
        drafts = _drafts(history, row, first, num_drafts)[0].tolist()
        samples = sampled[begin : begin + 1 + num_drafts].tolist()
        right = 0
        while right < len(drafts) and drafts[right] == samples[right]:
            right += 1
        num_computed[row] += 1 + right
        if first + right < history.max_len:
            history.recent[row, (first + right) % history.ring] = samples[right]
        kept[0, i], kept[1, i] = 1 + right, num_proposed[row]


def _drafts(history: History, row: int, first: int, num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """→ those behind position `first` that are before max_len, and their places in the row's ring."""
    place = torch.arange(first, max(first, min(first + num_drafts, history.max_len))) % history.ring
    return history.recent[row, place], place


def verify_drafts_triton(
    history: History, num_computed: torch.Tensor, num_proposed: torch.Tensor, rows: torch.Tensor,
    query_start: torch.Tensor, sampled: torch.Tensor, sample_index: torch.Tensor, kept: torch.Tensor, num_drafts: int,
) -> None:  # fmt: skip
    num_rows = rows.shape[0]
    if num_rows:
        _verify_kernel[(triton.cdiv(num_rows, 128),)](
            history.recent, num_computed, num_proposed, rows, query_start, sampled, sample_index, kept,
            history.max_len, num_rows, num_drafts, RING=history.ring, BLOCK=128, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_drafts"])
def _verify_kernel(
    recent_ptr, num_computed_ptr, num_proposed_ptr, rows_ptr, query_start_ptr, sampled_ptr, sample_index_ptr,
    kept_ptr, max_len, num_rows, num_drafts, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_rows
    row = tl.load(rows_ptr + request, mask=inside, other=0).to(tl.int64)
    begin = tl.load(query_start_ptr + request, mask=inside, other=0)
    end = tl.load(query_start_ptr + request + 1, mask=inside, other=0)
    active = inside & (end > begin)
    first = tl.load(num_computed_ptr + row, mask=active, other=0) + 1
    sample = sampled_ptr + tl.load(sample_index_ptr + request, mask=active, other=0)
    ring_ptr = recent_ptr + row * RING
    right = tl.zeros([BLOCK], tl.int32)
    holds = active
    for place in range(num_drafts):
        holds = holds & (first + place < max_len)
        draft = tl.load(ring_ptr + (first + place) % RING, mask=holds, other=-1)
        token = tl.load(sample + place, mask=holds, other=-2)
        holds = holds & (draft == token)
        right += holds.to(tl.int32)
    tl.store(num_computed_ptr + row, first + right, mask=active)
    is_there = active & (first + right < max_len)
    token = tl.load(sample + right, mask=is_there, other=0)
    tl.store(ring_ptr + (first + right) % RING, token, mask=is_there)
    proposed = tl.load(num_proposed_ptr + row, mask=active, other=0)
    tl.store(kept_ptr + request, tl.where(active, 1 + right, 0), mask=inside)
    tl.store(kept_ptr + num_rows + request, proposed, mask=inside)


_HASHED = tl.constexpr(1 << 32)


def impose_acceptance(
    history: History, num_computed: torch.Tensor, seeds: torch.Tensor, rows: torch.Tensor,
    query_start: torch.Tensor, sampled: torch.Tensor, sample_index: torch.Tensor, thresholds: torch.Tensor,
    num_drafts: int,
) -> None:  # fmt: skip
    """Before verify_drafts, of which the arguments are: makes so many drafts hold, whatever was sampled.

    Draft i of a request holds while thresholds[i], int64 [K] of 2**32 and not growing, is above a hash of seeds[row],
    int32 [R + 1], and its position. What was sampled in the place of those becomes the draft, and the draft behind them
    another token than its sample. What comes out means nothing: this is for measuring.
    """
    (impose_acceptance_triton if history.pages.is_cuda else impose_acceptance_torch)(
        history, num_computed, seeds, rows, query_start, sampled, sample_index, thresholds, num_drafts
    )


def impose_acceptance_torch(
    history: History, num_computed: torch.Tensor, seeds: torch.Tensor, rows: torch.Tensor,
    query_start: torch.Tensor, sampled: torch.Tensor, sample_index: torch.Tensor, thresholds: torch.Tensor,
    num_drafts: int,
) -> None:  # fmt: skip
    limits = thresholds.tolist()[:num_drafts]
    for row, length, begin in zip(rows.tolist(), query_start.diff().tolist(), sample_index.tolist(), strict=True):
        if not length:
            continue
        first = int(num_computed[row]) + 1
        word = ((int(seeds[row]) & 0xFFFFFFFF) ^ (first * 0x9E3779B1)) & 0xFFFFFFFF
        for _ in range(2):
            word = ((word ^ (word >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        word ^= word >> 16
        right = sum(limit > word for limit in limits)
        drafts, places = _drafts(history, row, first, num_drafts)
        sampled[begin : begin + min(right, len(drafts))] = drafts[:right]
        if right < len(drafts):
            history.recent[row, places[right]] = int(sampled[begin + right] == 0)


def impose_acceptance_triton(
    history: History, num_computed: torch.Tensor, seeds: torch.Tensor, rows: torch.Tensor,
    query_start: torch.Tensor, sampled: torch.Tensor, sample_index: torch.Tensor, thresholds: torch.Tensor,
    num_drafts: int,
) -> None:  # fmt: skip
    if num_rows := rows.shape[0]:
        _impose_kernel[(triton.cdiv(num_rows, 128),)](
            history.recent, num_computed, seeds, rows, query_start, sampled, sample_index, thresholds,
            seeds.stride(0), history.max_len, num_rows, num_drafts, RING=history.ring, BLOCK=128, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_drafts"])
def _impose_kernel(
    recent_ptr, num_computed_ptr, seeds_ptr, rows_ptr, query_start_ptr, sampled_ptr, sample_index_ptr,
    thresholds_ptr, seed_stride, max_len, num_rows, num_drafts, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_rows
    row = tl.load(rows_ptr + request, mask=inside, other=0).to(tl.int64)
    begin = tl.load(query_start_ptr + request, mask=inside, other=0)
    end = tl.load(query_start_ptr + request + 1, mask=inside, other=0)
    active = inside & (end > begin)
    first = tl.load(num_computed_ptr + row, mask=active, other=0) + 1
    sample = sampled_ptr + tl.load(sample_index_ptr + request, mask=active, other=0)
    ring_ptr = recent_ptr + row * RING
    word = tl.load(seeds_ptr + row * seed_stride, mask=active, other=0).to(tl.int64) % _HASHED
    word = ((word + _HASHED) % _HASHED) ^ ((first.to(tl.int64) * 0x9E3779B1) % _HASHED)
    for _ in tl.static_range(2):
        word = ((word ^ (word >> 16)) * 0x45D9F3B) % _HASHED
    word = word ^ (word >> 16)
    goes_on = active
    for place in range(num_drafts):
        is_there = goes_on & (first + place < max_len)
        goes_on = is_there & (tl.load(thresholds_ptr + place) > word)
        draft = tl.load(ring_ptr + (first + place) % RING, mask=is_there, other=0)
        token = tl.load(sample + place, mask=is_there, other=0)
        tl.store(sample + place, draft, mask=goes_on)
        tl.store(ring_ptr + (first + place) % RING, (token == 0).to(tl.int32), mask=is_there & ~goes_on)
