"""A device whose rows have recurrent state beside their blocks, in slots: what a state is, a hash chain tells.

It follows plans alone, as a real one does. Before a step, snapshots are copied to the slots of new rows, all at once.
Then a row folds what is pending of its tokens, whose inputs are in the ring of its slot, computes the step's tokens,
and folds those of them that are certain; where a state passes the boundary of an export, slot and ring are copied.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm

from vserve.engine.link.plan import NewRow, StateExport, StepPlan
from vserve.engine.options.scheduler_config import SchedulerConfig

from .test_scheduler_properties import GARBAGE, Device, Row, Simulation, most_held, next_state

SEEN = 3  # inputs before a token's own that its convolution sees


@dataclass
class Slot:
    state: int | None = None  # after some tokens, how many the row or the snapshot's user knows; None: never written
    ring: dict[int, tuple[int, int]] = field(default_factory=dict)  # position % size → (position, token)

    def copy(self) -> Slot:
        return Slot(self.state, dict(self.ring))


class StateRow(Row):
    def __init__(self, new: NewRow, salt: str | None, num_groups: int) -> None:
        self.tokens: list[int] = []
        super().__init__(new, salt, num_groups)
        self.slot, self.folded = new.state_slot, new.num_computed_tokens
        self.folds_to = 0  # of the step that runs

    def push(self, token: int) -> None:
        del self.tokens[len(self.states) :]
        super().push(token)
        self.tokens.append(token)


class StateDevice(Device):
    row_type = StateRow

    def __init__(self, config: SchedulerConfig, salts: dict[int, str | None]) -> None:
        super().__init__(config, salts)
        self.slots = [Slot() for _ in range(config.num_state_slots)]
        # Positions whose inputs a slot keeps: what a convolution sees, what is not folded yet, and what a step writes.
        self.ring = SEEN + 2 * (1 + config.max_drafts)
        self.exports: dict[int, StateExport] = {}  # of a step, by row
        self.by_number: Mapping[int, int] = {}  # id of a row object → its number
        self.num_adopted = 0  # rows that go on in the slot of a snapshot

    def apply_diffs(self, plan: StepPlan) -> None:
        super().apply_diffs(plan)
        copied = {}
        for new in plan.new_rows:
            assert 0 < new.state_slot < len(self.slots), "no slot"
            assert (new.restored_from > 0) == (new.num_computed_tokens > 0), "a state that comes from nowhere"
            if new.restored_from > 0:
                copied[new.state_slot] = new.restored_from
        for own, source in copied.items():  # of one launch: nothing may be read and written
            assert own == source or own not in copied.values(), "a snapshot is overwritten while it is copied"
        for own, source in copied.items():
            self.slots[own] = self.slots[source].copy()
        self.num_adopted += sum(own == source for own, source in copied.items())
        self.exports = {export.row: export for export in plan.exports}
        assert len(self.exports) == len(plan.exports), "two exports of a row"
        assert set(self.exports) <= set(plan.rows)
        self.by_number = {id(self.rows[number]): number for number in plan.rows}

    def check_shape(self, plan: StepPlan) -> None:
        super().check_shape(plan)
        taken = [row.slot for number, row in self.rows.items() if number in plan.rows]
        assert len(set(taken)) == len(taken), "two rows with one slot"
        for index, (number, num_new) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            row = self.rows[number]
            start, end = row.computed, row.computed + num_new
            ends = end >= len(row.states)  # with drafts, behind it
            assert ends or end % self.config.grain == 0, "a chunk of a prompt ends anywhere"
            row.folds_to = self.folds_to(start, end, index < plan.num_decodes, index in plan.sampled)

    def folds_to(self, start: int, end: int, decodes: bool, samples: bool) -> int:
        return start if decodes else end - samples

    def write(self, row: Row, num_new: int, fails: bool) -> None:
        super().write(row, num_new, fails)
        assert isinstance(row, StateRow)
        slot = self.slots[row.slot]
        most = row.folded + 1 + self.config.max_drafts
        assert row.folded <= row.computed <= most, "the state is ahead of its tokens, or far behind"
        self.fold(row, row.computed)
        for position in range(max(0, row.computed - SEEN), row.computed):
            self.input(slot, position)
        state = slot.state if row.folded else row.seed
        wanted = row.states[row.folded - 1] if row.folded else row.seed
        if state != wanted and not row.tainted:
            assert state == GARBAGE, f"request {row.request_id}: the state of another prefix after {row.folded} tokens"
            row.tainted = True
        for position in range(row.computed, row.computed + num_new):
            spoilt = fails or row.tainted or row.states[position] == GARBAGE
            slot.ring[position % self.ring] = (position, GARBAGE if spoilt else row.tokens[position])
            if position < row.folds_to:
                self.fold(row, position + 1)
        self.exports.pop(self.by_number[id(row)], None)

    def fold(self, row: StateRow, end: int) -> None:
        """From the ring."""
        slot = self.slots[row.slot]
        while row.folded < end:
            token = self.input(slot, row.folded)
            before = slot.state if row.folded else row.seed
            slot.state = GARBAGE if GARBAGE in (before, token) else next_state(before or 0, token)
            row.folded += 1
            export = self.exports.get(self.by_number[id(row)])
            if export is not None and export.boundary == row.folded:
                assert export.slot not in (0, row.slot)
                self.slots[export.slot] = slot.copy()

    def input(self, slot: Slot, position: int) -> int:
        found, token = slot.ring[position % self.ring]
        assert found == position, f"the ring has the input of {found}, and not of {position}"
        return token


class EagerDevice(StateDevice):
    """Folds what may be taken back: a token whose next one is sampled, and drafts."""

    def folds_to(self, start: int, end: int, decodes: bool, samples: bool) -> int:
        return end


def with_state(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """Slots for some of the requests that may run, or for all and snapshots besides."""
    tokens = rng.choice([2, 2, 4, 8])
    size = min(config.block_size, rng.choice([1, 2, 4, 16]))
    context = config.max_model_len * rng.choice([1, 1, 2])
    blocks = (config.num_blocks - 1) * config.block_size // size + 1
    decodes = (config.max_num_seqs - 1) * (1 + config.max_drafts)
    budget = max(config.max_num_batched_tokens, decodes + lcm(tokens, size))
    if any(config.windows):
        alone = sum(most_held(context, window, budget, size) for window in config.windows)
        blocks = max(blocks, 1 + alone)
    return replace(
        config, block_size=size, num_blocks=blocks, max_model_len=context, max_num_batched_tokens=budget,
        state_snapshot_tokens=tokens, num_state_slots=1 + rng.choice([1, 2, 3, 5, 8, 30, 30]),
    )  # fmt: skip


class StateSimulation(Simulation):
    def __init__(self, seed: int, *, device: type[Device] = StateDevice, **options) -> None:
        super().__init__(seed, device=device, adapt=with_state, **options)

    def launch(self) -> bool:
        state = self.scheduler.kv.state
        assert state is not None
        before = state.num_restores
        launched = super().launch()
        restored = state.num_restores - before
        self.seen["restore"] += restored
        if launched and self.scheduler.in_flight and (step := self.scheduler.in_flight[-1]).exports:
            snapshots = {snapshot.slot: snapshot for snapshot in state.pending}
            for snapshot in (snapshots[export.slot] for export in step.exports if export.slot in snapshots):
                kind = "decode snapshot" if snapshot.decoded else "prompt snapshot"
                self.seen[kind if snapshot.written else "export in several plans"] += 1
        self.seen["waits for a slot"] += not state.pool.num_free and bool(self.scheduler.roster.waiting)
        return launched

    def check_end(self) -> None:
        super().check_end()
        state = self.scheduler.kv.state
        assert state is not None
        state.settle()
        assert not state.held and not state.pending
        assert state.pool.num_free == self.config.num_state_slots - 1, "idle, but slots are taken"
        assert isinstance(self.device, StateDevice)
        self.seen["goes on in a snapshot"] += self.device.num_adopted
        self.seen["skipped export"] += state.num_skipped_exports
