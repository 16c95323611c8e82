"""The slots on the device, and what adds an adapter's share to the products of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...kernels.experts.moe_lora import ExpertLora, ExpertPairs
from ...kernels.launch import pdl
from ...kernels.linear.linear_hopper import MOST_LOW_COLUMNS, ByToken, Share, takes
from ...kernels.lora.lora import (
    BEHIND_PRESENT,
    ROWS_BESIDE,
    ROWS_PRESENT,
    TILINGS,
    Columns,
    Tiles,
    column_blocks,
    expand,
    expand_silu_mul,
    is_shrunk_by_gluon,
    look_up,
    max_tiles,
    shrink,
    tiling_of,
)
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import Experts
from ..layers.linear import Linear
from ..link.plan import StepPlan
from .layout import RANK_UNIT, AdapterStore, Packed, Place, part_sizes

NO_SLOT = -1
NOBODY = -2  # no slot either, nor that of a token that has none
ALIGNMENT = 4  # numbers of four bytes: Triton compiles a kernel again for pointers that are no multiples of 16 bytes


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class Grouping:
    """Tokens (or sampled rows) of a step by slot, in memory that stays where it is: graphs read it."""

    def __init__(self, max_tokens: int, num_slots: int, device: torch.device, presence: bool = True) -> None:
        """presence: ByToken.present is asked for; else it has no columns."""
        self.num_slots = num_slots
        self._width = aligned(max(max_tiles(min(max_tokens, tiling.tokens), num_slots) for tiling in TILINGS))
        self._order = 3 * self._width + aligned(2)  # where it begins, behind the two numbers of ByToken.counts
        self._present = aligned(1 + num_slots + BEHIND_PRESENT) if presence else 0  # columns of ByToken.present
        size = self._order + 3 * aligned(max_tokens) + -(-max_tokens // ROWS_PRESENT) * self._present
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"

    def tiles(self, num_tokens: int) -> Tiles:
        """Of a step of so many tokens, padding included: views of what `fill` writes."""
        count, width, memory = max_tiles(num_tokens, self.num_slots), self._width, self._device
        slots, starts, ends = (memory[line * width : line * width + count] for line in range(3))
        return Tiles(slots, starts, ends, self._of_tokens(0, num_tokens), tiling_of(num_tokens))

    def by_token(self, num_tokens: int) -> ByToken:
        """As tiles."""
        groups = -(-num_tokens // ROWS_PRESENT)
        present = self._device[self._order + 3 * aligned(num_tokens) :][: groups * self._present]
        counts = self._device[3 * self._width :][:2]
        present = present.view(groups, self._present)
        return ByToken(counts, self.token_slots(num_tokens), self._of_tokens(2, num_tokens), present)

    def token_slots(self, num_tokens: int) -> Tensor:
        """int32 [num_tokens], as tiles: the slot of each, or NO_SLOT."""
        return self._of_tokens(1, num_tokens)

    def _of_tokens(self, line: int, num_tokens: int) -> Tensor:
        return self._device[self._order + line * aligned(num_tokens) :][:num_tokens]

    def clear(self) -> None:
        self._device.zero_()

    def fill(self, slots: np.ndarray, lengths: np.ndarray, num_tokens: int) -> None:
        """slots int [rows], NO_SLOT for none; lengths int [rows]: tokens of each, one row behind the other;
        num_tokens: what the step is padded to."""
        width, rows = self._width, tiling_of(num_tokens).rows
        line, groups = aligned(num_tokens), -(-num_tokens // ROWS_PRESENT)
        behind = self._order + 3 * line
        host = torch.empty(behind + groups * self._present, dtype=torch.int32, pin_memory=self._pinned)
        table = host.numpy()
        table[:behind] = 0
        order, of_tokens, indices = (table[self._order + i * line :][:num_tokens] for i in range(3))
        starts = np.cumsum(lengths) - lengths  # of each row's tokens
        chosen = np.flatnonzero((slots != NO_SLOT) & (lengths > 0))
        chosen = chosen[np.argsort(slots[chosen], kind="stable")]
        counts = lengths[chosen]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        order[:total] = np.repeat(starts[chosen] - (ends - counts), counts) + np.arange(total)
        indices[order[:total]] = np.arange(total)
        of_tokens[:] = NO_SLOT  # of those that pad, too
        of_tokens[: lengths.sum()] = np.repeat(slots, lengths)
        order[total:] = np.flatnonzero(of_tokens == NO_SLOT)
        block = first = 0
        sums = np.bincount(slots[chosen], weights=counts, minlength=self.num_slots).astype(np.int64)
        for slot, count in enumerate(sums.tolist()):
            for start in range(first, first + count, rows):
                table[block], table[width + block] = slot, start
                table[2 * width + block] = min(start + rows, first + count)
                block += 1
            first += count
        table[3 * width : 3 * width + 2] = total, block
        if self._present:
            self._fill_present(table[behind:].reshape(groups, -1), order[:total], np.repeat(slots[chosen], counts))
        self._device[: len(table)].copy_(host, non_blocking=True)

    def _fill_present(self, present: np.ndarray, tokens: np.ndarray, slots: np.ndarray) -> None:
        """Of tokens and their slots."""
        there = np.zeros((len(present), self.num_slots), dtype=bool)
        there[tokens // ROWS_PRESENT, slots] = True
        counts = there.sum(1)
        present[:, 0], present[:, 1:] = counts, NOBODY
        group, slot = np.nonzero(there)
        present[group, 1 + np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)] = slot


class AdapterStep:
    """What the products of the step under way need to know."""

    def __init__(self, grouping: Grouping, device: torch.device) -> None:
        """grouping: where `tokens` are views of."""
        self._grouping = grouping
        self.tokens: Tiles | None = None  # None: no row of the step has an adapter
        self.sampled: Tiles | None = None  # of the rows whose logits are computed
        self.slots: Tensor | None = None  # int32 [T], of tokens; None: no row has an adapter that changes experts
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # see LinearAdapter.added

    @property
    def by_token(self) -> ByToken:
        """The same as `tokens`."""
        assert self.tokens is not None
        return self._grouping.by_token(len(self.tokens.order))

    def beside(self, rows: int) -> torch.cuda.Stream | None:
        """Where A x of so many rows is computed beside W x. Of fewer, kernels overlap within their stream; of more,
        the programs of A x take room from those of W x (256 rows: 11.7 instead of 10.7 ms a step)."""
        return self.stream if pdl.MAX_ROWS < rows <= ROWS_BESIDE else None


class LinearAdapter:
    def __init__(self, step: AdapterStep, a: Tensor, b: Tensor, used: Tensor, columns: Columns) -> None:
        self._step, self._a, self._b, self._used, self._columns = step, a, b, used, columns

    @property
    def active(self) -> bool:
        return self._tiles(None) is not None

    def added(self, x: Tensor, multiply: Callable[[], Tensor], late: bool = False, gated: bool = False) -> Tensor:
        """multiply(), the product y with x [T, in], += B A x of each token's adapter; gated: silu_mul of that. late: a
        kernel behind it starts once x is there. Where A x has a stream of its own, both read what was there before, and
        x lives until B h is launched; a step that fails between them is followed by a wait for all of the card
        (executor.py)."""
        tiles = self._tiles(len(x))
        assert tiles is not None and len(x) == len(tiles.order), f"{len(x)} rows where the step has others"
        stream = self._step.beside(len(x))
        if late:
            y = multiply()
            low = shrink(x, self._a, self._used, tiles, beside=True)
        elif stream is None:
            low = shrink(x, self._a, self._used, tiles)  # a product that is a dependent launch reads weights meanwhile
            y = multiply()
        else:
            main = torch.cuda.current_stream(x.device)
            stream.wait_stream(main)
            y = multiply()
            # Behind it, A x takes the room that its programs leave; before it, they would wait for those of A x.
            with torch.cuda.stream(stream):
                low = shrink(x, self._a, self._used, tiles)
            main.wait_stream(stream)
        if gated:
            return expand_silu_mul(low, self._b, self._columns, self._used, tiles, self._step.by_token.counts, y)
        expand(low, self._b, self._columns, self._used, tiles, y)
        return y

    def share(self, x: Tensor) -> Share | None:
        """What a gated product of x [T, in], launched next, adds in its own pass; None where it cannot."""
        tiles = self._step.tokens
        assert tiles is not None and len(x) == len(tiles.order), f"{len(x)} rows where the step has others"
        if not takes(x, self._b):
            return None
        runs = is_shrunk_by_gluon(x, self._a, tiles)
        return Share(shrink(x, self._a, self._used, tiles, leads=runs), self._b, self._used, self._step.by_token, runs)

    def _tiles(self, rows: int | None) -> Tiles | None:
        """Of the step under way, in which there are so many rows here."""
        return self._step.tokens


class HeadAdapter(LinearAdapter):
    """Of the rows whose logits are computed."""

    def _tiles(self, rows: int | None) -> Tiles | None:
        tiles = self._step.sampled
        if tiles is not None and rows is not None and rows < len(tiles.order):
            tiles = tiles._replace(order=tiles.order[:rows])
        return tiles


class EmbeddingAdapter(LinearAdapter):
    def added(self, x: Tensor, multiply: Callable[[], Tensor], late: bool = False, gated: bool = False) -> Tensor:
        """x: ids int [T]; of transformers' code [1, T]."""
        tiles, y = self._tiles(None), multiply()
        assert tiles is not None
        low = look_up(x.view(-1), self._a, self._used, tiles)
        expand(low, self._b, self._columns, self._used, tiles, y.view(-1, y.shape[-1]))
        return y


class ExpertsAdapter:
    def __init__(self, step: AdapterStep, gate_up: ExpertPairs, down: ExpertPairs) -> None:
        self._step, self._gate_up, self._down = step, gate_up, down

    @property
    def lora(self) -> ExpertLora | None:
        slots = self._step.slots
        return None if slots is None else ExpertLora(self._gate_up, self._down, slots)


class AdapterTables:
    """All slots, bound to the model's modules. What is called between steps is for what the current stream does from
    then on."""

    def __init__(
        self, store: AdapterStore, num_slots: int, device: torch.device, max_tokens: int, max_rows: int
    ) -> None:
        """max_tokens: of a step, padding included; max_rows: requests at once."""
        self.store, self.layout, self.num_slots = store, store.layout, num_slots
        self._head: Tiles | None = None  # of the step's sampled rows
        self.row_slots = np.full(max_rows + 1, NO_SLOT)  # of each row of the device tables
        self._slots = self.row_slots[:0]  # of each row of the step
        self._taken: dict[int, Packed] = {}  # by id, see take
        layout = store.layout
        self._memory = torch.zeros(num_slots, layout.size, dtype=store.dtype, device=device)
        self._used = torch.zeros(len(layout.places), aligned(num_slots), dtype=torch.int32, device=device)
        self._tokens = Grouping(max_tokens, num_slots, device, presence=num_slots * RANK_UNIT <= MOST_LOW_COLUMNS)
        self._sampled = Grouping(max_tokens, num_slots, device, presence=False)
        self.step = AdapterStep(self._tokens, device)
        self.has_head = False
        for place in layout.places:
            if not isinstance(place.holder, Experts):
                place.holder.adapter = self._bound(place, place.holder, device)
        for holder, gate_up, down in layout.experts:
            pairs = (ExpertPairs(*self._matrices(place)) for place in (gate_up, down))
            holder.adapter = ExpertsAdapter(self.step, *pairs)
        self._changes_experts = np.full(num_slots, bool(layout.experts))  # of each slot, as far as is known

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def load(self, slot: int, packed: Packed) -> None:
        self._memory[slot].copy_(packed.flat, non_blocking=True)
        self._used[:, slot].copy_(packed.used, non_blocking=True)
        self._changes_experts[slot] = packed.has_experts

    def fill_with_noise(self) -> None:
        """Every slot, for measurements."""
        self._memory.normal_(0.0, 0.01)
        self._used.fill_(1)
        self._changes_experts[:] = bool(self.layout.experts)

    def take(self, plan: StepPlan) -> None:
        """What the plan copies, for a `begin` on another thread: by then the host may have let go of it."""
        self._taken = {copy.id: self.store.get(copy.id, copy.path) for copy in plan.adapters}

    def begin(self, plan: StepPlan) -> bool:
        """Takes in the plan's copies and rows. Whether some row of the step has an adapter."""
        self.end()  # what a step that failed has left
        for copy in plan.adapters:
            self.load(copy.slot, self._taken.get(copy.id) or self.store.get(copy.id, copy.path))
        self._taken = {}
        for new in plan.new_rows:
            self.row_slots[new.row] = new.slot
        self._slots = self.row_slots[plan.rows]
        return bool((self._slots != NO_SLOT).any())

    def group(self, plan: StepPlan, num_tokens: int, num_logits: int) -> None:
        """Of the plan that has begun, padded to so many tokens and rows whose logits are computed."""
        self._tokens.fill(self._slots, np.array(plan.num_tokens), num_tokens)
        self.use(num_tokens)
        if not self._changes_experts[self._slots[self._slots != NO_SLOT]].any():
            self.step.slots = None  # a graph that is replayed finds nothing to add
        if self.has_head and plan.sampled:
            samples = np.ones(len(plan.sampled), dtype=np.int64)
            samples[: plan.num_decodes if plan.num_drafts else 0] += plan.num_drafts
            self._sampled.fill(self._slots[plan.sampled], samples, num_logits)
            self._head = self._sampled.tiles(num_logits)

    def clear(self) -> None:
        """No token has an adapter: for graphs that are replayed before any step has filled their tables, or one of
        another size."""
        self._tokens.clear()
        self._sampled.clear()

    def use(self, num_tokens: int) -> None:
        """What is launched from now on is for a step of so many tokens that has adapters."""
        self.step.tokens = self._tokens.tiles(num_tokens)
        if self.layout.experts:
            self.step.slots = self._tokens.token_slots(num_tokens)

    def begin_sampling(self) -> None:
        """Logits from now on are those of the sampled rows. Earlier ones are of prompts that have no adapter there."""
        self.step.sampled = self._head

    def end(self) -> None:
        """What is launched from now on has none."""
        self.step.tokens = self.step.sampled = self.step.slots = self._head = None

    def _bound(self, place: Place, holder: Linear | Embedding, device: torch.device) -> LinearAdapter:
        kind = LinearAdapter
        if isinstance(holder, Linear):
            sizes = part_sizes(holder.shape)
            if isinstance(holder, LMHead):
                kind, self.has_head = HeadAdapter, True
        else:
            sizes, kind = [place.b_shape[0]], EmbeddingAdapter
        return kind(self.step, *self._matrices(place), column_blocks(sizes, device))

    def _matrices(self, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        """A and B of all slots, and where they are used."""
        layout, memory = self.layout, self._memory
        return layout.view_a(memory, place), layout.view_b(memory, place), self._used[place.index, : self.num_slots]
