"""A drafter, which writes tokens behind those that there are, on the device; pages for keys of what is only drafted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.attention.attention_parts import PagedCache
from ...kernels.sampling.ngram import propose_ngrams
from ..cache.rows import RowTables
from ..layers.attention import Attention
from ..options.speculation import Speculation


class Drafter(Protocol):
    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        """After the step's tokens have been appended. For the rows that sampled (sample_index ≥ 0), both int32 [B]:
        drafts into the history's rings, behind the last token, any valid ids where there is none; how many are meant
        goes to num_proposed, and, 0 for the others, into the result, int32 [B]."""
        ...


class NgramDrafter:
    """What came when the last few tokens stood there before."""

    def __init__(self, settings: Speculation) -> None:
        self.settings = settings

    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        found = rows.new_empty(len(rows))
        settings = self.settings
        propose_ngrams(
            tables.history, tables.num_computed, rows, sample_index, tables.num_proposed, found,
            settings.min_ngram, settings.max_ngram, settings.num_drafts,
        )  # fmt: skip
        return found


def thresholds(acceptance: tuple[float, ...], device: torch.device) -> Tensor:
    """As impose_acceptance wants them."""
    return torch.tensor([round(rate * (1 << 32)) for rate in acceptance], dtype=torch.int64, device=device)


class Always:
    """A drafter whose drafts all count as proposed."""

    def __init__(self, drafter: Drafter, num_drafts: int) -> None:
        self.drafter, self.num_drafts = drafter, num_drafts

    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        self.drafter.propose(tables, rows, sample_index)
        sampled = sample_index >= 0
        found = self.num_drafts * sampled.int()
        tables.num_proposed.index_copy_(0, torch.where(sampled, rows, tables.dummy_row).long(), found)
        return found


def pages_for(num_drafts: int, page: int) -> int:
    """Of a request, from the one that its last token is in."""
    return -(-(page - 1 + num_drafts) // page)


@dataclass
class _Group:
    """Layers that have a block table together."""

    layers: list[Attention]
    caches: list[PagedCache]  # of each, with the pages behind
    table: Tensor  # int32 [rows, blocks + pages]
    own: Tensor  # int32 [rows, pages]: those pages, of the group alone as some of its memory may be another group's too


class Scratch:
    """Pages for up to `rows` requests at once, the same ones of every layer of a group."""

    def __init__(self, layers: list[Attention], rows: int, pages: int, page: int, num_blocks: int) -> None:
        """layers: bound to caches of num_blocks blocks, behind which each of their groups has rows · pages more."""
        self.pages, self.page = pages, page
        self._groups: dict[int, _Group] = {}
        for layer in layers:
            cache = layer.cache
            assert cache is not None
            if layer.group not in self._groups:
                width, first = cache.block_table.shape[1] + pages, num_blocks + len(self._groups) * rows * pages
                own = first + torch.arange(rows * pages, dtype=torch.int32, device=cache.keys.device)
                table = cache.block_table.new_zeros(rows, width)
                self._groups[layer.group] = _Group([], [], table, own.view(rows, pages))
            group = self._groups[layer.group]
            group.layers.append(layer)
            group.caches.append(cache)

    @contextmanager
    def tables(self, rows: Tensor, last: Tensor) -> Iterator[None]:
        """The layers use tables for these requests: rows int32 [B] of the real tables, last int32 [B]: the position of
        the last token. What stands before it in its page is copied. Whatever raises, they have the real ones again: a
        step that fails is not the last, and the next has rows that these tables lack."""
        try:
            self._fill(rows, last)
            yield
        finally:
            for group in self._groups.values():
                for layer, cache in zip(group.layers, group.caches, strict=True):
                    layer.cache = cache

    def _fill(self, rows: Tensor, last: Tensor) -> None:
        count, first = len(rows), (last // self.page).long()
        for group in self._groups.values():
            own = group.own[:count]
            real = group.caches[0].block_table.index_select(0, rows)
            table = group.table[:count]
            table[:, : real.shape[1]] = real
            old = table.gather(1, first[:, None]).squeeze(1)
            table.scatter_(1, first[:, None] + torch.arange(self.pages, device=first.device), own)
            for layer, cache in zip(group.layers, group.caches, strict=True):
                for kept in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
                    if kept is not None and kept.stride(0):
                        kept = kept.view(torch.uint8) if kept.itemsize == 1 else kept
                        kept.index_copy_(0, own[:, 0].long(), kept.index_select(0, old))
                layer.cache = replace(cache, block_table=group.table)

    def slots(self, positions: Tensor, count: int) -> dict[int, Tensor]:
        """positions int64 [K, B] → of each group, int32 [K, B]: where their keys go."""
        place = positions // self.page
        return {
            index: group.table[:count].gather(1, place.t()).t() * self.page + (positions % self.page).int()
            for index, group in self._groups.items()
        }
