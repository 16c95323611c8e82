"""Drafts by a model or a head: what the target has just computed is read once more, then tokens follow one by one.

Everything is on the device and of sizes that follow from the step's padded shape, so that a CUDA graph can be made of
it. Keys and values of what is known go to the request's own blocks, in layers of the same cache; those of drafts do not
(drafter.py). Rows of padding get drafts like others, which go to a row that no request has: they cost next to nothing
beside the weights that are read for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.attention.attention import DecodeWorkspace
from ...kernels.attention.history import read_tokens
from ...kernels.sampling.argmax import argmax
from ...kernels.sampling.sampling import sample
from ..cache.batch import QUERY_START, ROWS, SAMPLE_INDEX, Batch, Shape
from ..cache.rows import NUM_COLUMNS, SEED, TOP_K, RowTables, aligned
from ..layers.attention import Attention, AttentionBatch
from ..models.model import Features
from ..options.speculation import Speculation
from ..parallel.group import ALONE, Group
from .drafter import Scratch, pages_for


class Network(Protocol):
    """What drafts, without its state."""

    @property
    def shifted(self) -> bool:
        """Whether it reads, at a position, the token behind it, and what the target thinks there."""
        ...

    @property
    def features(self) -> Features | None: ...

    def read_features(self, features: Tensor) -> Tensor: ...

    def __call__(
        self, input_ids: Tensor, hidden: Tensor | None, positions: Tensor, batch: AttentionBatch,
        wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """→ [T, h] or, of the wanted tokens, [N, h]: what the next call takes as `hidden`, and `logits`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, h] → fp32 [N, vocab of the target]."""
        ...

    def attention_layers(self) -> list[Attention]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...


class ModelDrafter:
    def __init__(self, network: Network, settings: Speculation, group: Group = ALONE) -> None:
        """group: of the target's ranks, each of which has a drafter with the same of a request's tokens."""
        self.network, self.settings, self.group = network, settings, group
        self.layers = network.attention_layers()
        self.num_rows = 0  # steps of more requests get no drafts
        self.workspace: DecodeWorkspace | None = None
        self.scratch: Scratch | None = None

    def prepare(self, num_rows: int, page: int, device: torch.device) -> None:
        """For steps of up to so many requests, padding included."""
        self.num_rows, self.page = num_rows, page
        if device.type == "cuda":
            heads = max(layer.num_heads for layer in self.layers)
            value_dim = max(layer.spec.value_dim for layer in self.layers)
            self.workspace = DecodeWorkspace.create(num_rows, heads, value_dim, device, 1)

    def reserve(self, num_tokens: int) -> None:
        """Room for what is read of steps of so many tokens, before the first CUDA graph."""
        if self.network.features is not None:
            self.network.features.reserve(num_tokens)
            self.network.features.is_captured = True

    @property
    def num_scratch_blocks(self) -> int:
        """That each group of its layers has behind those of the cache."""
        return self.num_rows * pages_for(self.settings.num_drafts, self.page)

    def bind(self, num_blocks: int) -> None:
        """Once its layers have their caches."""
        pages = pages_for(self.settings.num_drafts, self.page)
        self.scratch = Scratch(self.layers, self.num_rows, pages, self.page, num_blocks)

    def num_drafts(self, shape: Shape) -> int:
        """Of each request in a step of this shape, for the next one."""
        if shape.rows > self.num_rows:
            return 0
        depths = self.settings.depths
        return next((drafts for most, drafts in depths if shape.decode_rows <= most), 0)

    def propose(self, tables: RowTables, batch: Batch, header: Tensor, shape: Shape) -> Tensor:
        """After the step's tokens have been appended: see Drafter."""
        rows, sample_index = header[ROWS, : shape.rows], header[SAMPLE_INDEX, : shape.rows]
        query_start = header[QUERY_START, : shape.rows + 1]
        known = tables.num_computed.index_select(0, rows)  # the position of the last token
        first = batch.positions.index_select(0, query_start[:-1].clamp(max=len(batch.positions) - 1))
        # Whose mask was late has computed nothing that holds.
        count, sampled = self.num_drafts(shape), (sample_index >= 0) & (known > first)
        hidden = self._read(tables, batch, rows, query_start, known, first)
        writable = torch.where(sampled, rows, tables.dummy_row)
        proposed = torch.zeros_like(rows)
        if count:
            known.clamp_(max=tables.history.max_len - 1)  # of requests that have filled their context
            # All verify the same: what two ranks have drawn alike, as a rule, they may have rounded otherwise.
            drafts = self.group.broadcast(self._draft(tables, rows, sampled, known, hidden, count))
            _write(tables, writable, known, drafts)
            proposed += count * (sampled & (known + count < self._limit(tables)))
        tables.num_proposed.index_copy_(0, writable.long(), proposed)
        return proposed

    def _limit(self, tables: RowTables) -> int:
        """Tokens of a context, beyond which it says nothing that is worth verifying."""
        return min(tables.history.max_len, self.settings.max_model_len or tables.history.max_len)

    def _read(
        self, tables: RowTables, batch: Batch, rows: Tensor, query_start: Tensor, known: Tensor, first: Tensor
    ) -> Tensor:
        """The step's tokens → [B, h], of the last one of each request that holds. first: each one's first position."""
        network, positions = self.network, batch.positions
        # What its layers share of a step is made here, not where the target has it or has not: a CUDA graph of the
        # drafts records how it is made.
        # The workspace was made for the target, which alone knows of pictures: drafts are checked whatever they are.
        attention = replace(batch.attention, expanded=None, pictures=None, cos_sin=None)
        num_tokens = len(positions)
        last = (query_start[:-1] + known - first - 1).clamp(0, num_tokens - 1)
        if not network.shifted:
            return network(batch.input_ids, None, positions, attention, last)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=positions.device)
        request = torch.searchsorted(query_start[1:], tokens, right=True).clamp_(max=len(rows) - 1)
        input_ids = read_tokens(tables.history, rows, known, request, positions + 1)
        assert network.features is not None
        hidden = network.read_features(network.features.of_step(num_tokens))
        return network(input_ids, hidden, positions, attention, last)

    def _draft(
        self, tables: RowTables, rows: Tensor, sampled: Tensor, known: Tensor, hidden: Tensor, count: int
    ) -> Tensor:
        """→ int32 [B, count]. hidden: of `_read`."""
        with nullcontext() if self.scratch is None else self.scratch.tables(rows, known):
            return self._draft_ahead(tables, rows, sampled, known, hidden, count)

    def _draft_ahead(
        self, tables: RowTables, rows: Tensor, sampled: Tensor, known: Tensor, hidden: Tensor, count: int
    ) -> Tensor:
        network, num_rows = self.network, len(rows)
        params = tables.params.new_empty(NUM_COLUMNS, aligned(num_rows))[:, :num_rows]
        params.copy_(tables.params.index_select(0, rows).t())
        ahead = torch.arange(count, device=rows.device)[:, None] + known
        positions = ahead.clamp(max=tables.history.max_len - 1)
        batches = self._batches(rows, sampled, positions)
        drafts = []
        if network.shifted:
            token = self._draw(network.logits(hidden), params, known + 1)
            drafts.append(token)
        else:
            token = tables.history.recent[rows, known % tables.history.ring]
        for step in range(count - len(drafts)):
            hidden = network(token, hidden, positions[step].int(), batches[step])
            token = self._draw(network.logits(hidden), params, known + 1 + len(drafts))
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def _batches(self, rows: Tensor, sampled: Tensor, positions: Tensor) -> list[AttentionBatch]:
        """Of each draft's position, positions int64 [K, B]: one token of each request."""
        num_rows = len(rows)
        own = torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device)
        groups = 1 + max(layer.group for layer in self.layers)
        nowhere = torch.full_like(positions, -1, dtype=torch.int32)
        slots = {} if self.scratch is None else self.scratch.slots(positions, num_rows)
        lengths = ((positions + 1) * sampled).int()
        found = []
        for step in range(len(positions)):
            of_groups = [torch.where(sampled, slots.get(group, nowhere)[step], -1) for group in range(groups)]
            found.append(AttentionBatch(num_rows, 1, 0, own[:-1], lengths[step], own, of_groups, self.workspace))
        return found

    def _draw(self, logits: Tensor, params: Tensor, positions: Tensor) -> Tensor:
        """As the target's token at these positions will be drawn: with the same noise, two distributions that are alike
        mostly give the same token. int32 [B]."""
        if self.settings.greedy_drafts:
            return argmax(logits)
        floats = params[:6].view(torch.float32)
        seeds = (params[SEED + 1].long() << 32) | (params[SEED].long() & 0xFFFFFFFF)
        return sample(logits, floats[0], params[TOP_K], floats[1], floats[2], seeds, positions.long())


def _write(tables: RowTables, rows: Tensor, known: Tensor, drafts: Tensor) -> None:
    """Drafts [B, K] behind the last tokens, in the rows' rings."""
    columns = known[:, None] + 1 + torch.arange(drafts.shape[1], dtype=torch.int32, device=drafts.device)
    places = rows.long()[:, None], (columns % tables.history.ring).long()
    tables.history.recent.index_put_(places, drafts)
