"""Prompts of latent attention, expanded: of each cached latent, every head's own key and value are made.

Absorbed, a pair of query and key costs a head 2R + rope products, expanded nope + rope + value: with DeepSeek's sizes
1,088 and 320. The expansion itself costs R · (nope + value) a key, which pays where enough queries see it.

What a step's prompts have cached is expanded piece by piece into one workspace, which all layers share: some requests
at a time, and of a context that is too long for all heads, some heads at a time. Heads and requests are independent, so
no piece's result has to be merged with another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .attention import prefill_attention_torch
from .attention_parts import PagedCache, RaggedBatch, Scoring, neighbouring_pages
from .attention_prefill import PrefillTile, prefill_attention_triton, prefill_tile

MOST_REQUESTS = 16  # of a piece: prefill attention's kernel has another variant for more


@dataclass(frozen=True)
class LatentSizes:
    """rank: of a latent; rope: of the part of a key that all heads share; nope and value: of each of `heads` heads."""

    rank: int
    rope: int
    nope: int
    value: int
    heads: int

    @property
    def row(self) -> int:
        """Elements of what is cached of a token."""
        return self.rank + self.rope

    @property
    def head(self) -> int:
        """Elements of a head's key and value."""
        return self.nope + self.rope + self.value

    def saved(self, query_lens: Sequence[int], contexts: Sequence[int]) -> int:
        """Products that a head is spared where these prompts are expanded; below 0 where it costs more.

        contexts: lengths, these query tokens included. Absorbed, each of those has as much done to it and to its result
        as the expansion of a key takes.
        """
        pairs = sum(q * context - q * (q - 1) // 2 for q, context in zip(query_lens, contexts, strict=True))
        expansion = self.rank * (self.nope + self.value)
        return pairs * (self.row + self.rank - self.head) - (sum(contexts) - sum(query_lens)) * expansion

    def workspace_elements(self, num_tokens: int, most: int, longest: int) -> int:
        """For so many tokens of context, but no more than `most`; at least one head of a context of `longest`."""
        wanted = min(num_tokens * (self.row + self.heads * self.head), most)
        return max(wanted, longest * (self.row + self.head))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring requests of a step's prompts, and how many heads fit at a time."""

    prompts: RaggedBatch  # whose rows are those of `table`
    table: Tensor  # neighbouring_pages, of the workspace
    places: Tensor  # int64 [2, P]: row and column in the cache's block table of each page
    heads: int


@dataclass(slots=True)
class ExpandedPrompts:
    """The prompts of a step, for layers that expand them.

    rows and contexts, on the host: those of `prompts`; a context may be longer there than it is, as far as its row of
    the block table goes. numbers: the workspace, flat, of LatentSizes.workspace_elements.
    """

    prompts: RaggedBatch
    rows: Sequence[int]
    contexts: Sequence[int]
    numbers: Tensor
    _pieces: dict[tuple[LatentSizes, int], list[Piece]] = field(default_factory=dict)

    def pieces(self, sizes: LatentSizes, page: int) -> list[Piece]:
        """Made when the first layer asks."""
        if (sizes, page) not in self._pieces:
            pages = [-(-context // page) for context in self.contexts]
            spans = split(pages, page, sizes, self.numbers.numel())
            self._pieces[sizes, page] = [self._piece(pages, *span) for span in spans]
        return self._pieces[sizes, page]

    def _piece(self, pages: Sequence[int], first: int, last: int, heads: int) -> Piece:
        device, counts = self.numbers.device, np.array(pages[first:last])
        starts = counts.cumsum() - counts
        count = int(counts.sum())
        places = np.stack(
            (np.repeat(self.rows[first:last], counts), np.arange(count) - np.repeat(starts, counts))
        ).astype(np.int64)
        prompts = self.prompts
        piece = RaggedBatch(
            _sent(starts.astype(np.int32), device),
            prompts.seq_lens[first:last],
            prompts.query_start[first : last + 1],
            prompts.max_query_len,
        )
        return Piece(piece, neighbouring_pages(count, device), _sent(places, device), heads)


def _sent(values: np.ndarray, device: torch.device) -> Tensor:
    found = torch.from_numpy(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def split(pages: Sequence[int], page: int, sizes: LatentSizes, capacity: int) -> Iterator[tuple[int, int, int]]:
    """(first request, behind the last one, heads at a time) of each piece. pages: of each request's context."""

    def heads_of(count: int) -> int:
        return (capacity // max(1, count * page) - sizes.row) // sizes.head

    first = 0
    while first < len(pages):
        last = first + 1
        while last < min(len(pages), first + MOST_REQUESTS) and heads_of(sum(pages[first : last + 1])) >= sizes.heads:
            last += 1
        most = min(sizes.heads, heads_of(sum(pages[first:last])))
        assert most > 0, "the workspace is too small for a head of this context"
        turns = -(-sizes.heads // most)
        yield first, last, -(-sizes.heads // turns)
        first = last


def expanded_attention(
    query: Tensor, cache: PagedCache, prompts: ExpandedPrompts, keys: Tensor, values: Tensor, scoring: Scoring,
    out: Tensor,
) -> None:  # fmt: skip
    """Causal attention of the step's prompts, whose own latents are in the cache.

    query [T, H, nope + rope], rotated. cache: keys [num_blocks, page, 1, R + rope]. keys [H, nope, R] and values
    [H, R, value] make a head's key and value of a latent. out [T, H, value]: rows of tokens outside the prompts keep
    what they held. All of one dtype.
    """
    heads, nope, rank = keys.shape
    _, page, _, row = cache.keys.shape
    sizes = LatentSizes(rank, row - rank, nope, values.shape[2], heads)
    for piece in prompts.pieces(sizes, page):
        count = piece.places.shape[1]
        tokens = count * page
        latents, rest = prompts.numbers[: tokens * row].view(tokens, row), prompts.numbers[tokens * row :]
        blocks = cache.block_table[piece.places[0], piece.places[1]]
        torch.index_select(cache.keys.flatten(2), 0, blocks, out=latents.view(count, page, row))
        for first in range(0, heads, piece.heads):
            some = slice(first, min(first + piece.heads, heads))
            number = some.stop - some.start
            key, value = (
                part.view(tokens, number, -1)
                for part in rest[: tokens * number * sizes.head].split(
                    [tokens * number * (nope + sizes.rope), tokens * number * sizes.value]
                )
            )
            compressed = latents[:, :rank].expand(number, -1, -1)
            torch.bmm(compressed, keys[some].transpose(1, 2), out=key[..., :nope].transpose(0, 1))
            torch.bmm(compressed, values[some], out=value.transpose(0, 1))
            key[..., nope:] = latents[:, None, rank:]
            expanded = PagedCache(key.unflatten(0, (count, page)), value.unflatten(0, (count, page)), piece.table)
            _attend(query[:, some], expanded, piece.prompts, scoring, out[:, some])


def _attend(query: Tensor, cache: PagedCache, prompts: RaggedBatch, scoring: Scoring, out: Tensor) -> None:
    if not query.is_cuda:
        prefill_attention_torch(query, cache, prompts, scoring, out=out)
        return
    # One tile for all, or requests would meet a kernel that is yet to be compiled.
    tile = expanded_tile(query.dtype, cache.keys.shape[3])
    prefill_attention_triton(
        query, cache, prompts, scoring, out=out, block_m=tile.block_m, block_n=tile.block_n, num_warps=tile.warps,
        num_stages=tile.stages, any_heads=True,
    )  # fmt: skip


@lru_cache
def expanded_tile(dtype: torch.dtype, key_size: int) -> PrefillTile:
    """That of the longest prompts, which of keys of 128 + 64 takes more at a time without spilling."""
    tile = prefill_tile(dtype, key_size, 1 << 30)
    return replace(tile, block_n=64) if dtype.itemsize == 2 and 128 < key_size <= 192 else tile
