"""The slots of recurrent state: which request has which, and which snapshots of states are still there.

A slot has room for the state of all layers of one sequence that have any. A running request holds one slot, which its
steps fold its tokens into; what a state was after an earlier token cannot be had from it any more. So copies of it are
exported to other slots, at multiples of `grain` tokens: snapshots, which a later request with the same prefix starts
from. They are slots that nobody references, under the key of the prefix's last block, and go when a slot is needed, the
least recently used one first.

Every step folds a row's tokens but one that samples, whose last token may be taken back (`Scheduler.postpone`), as
drafts may. How far a row is that takes drafts, the device alone knows: the plans from the first in which it may pass a
boundary to the first in which it surely has bear one and the same export, and the device writes it in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from ..errors import require
from ..link.plan import StateExport
from ..options.scheduler_config import SchedulerConfig
from .block_pool import NULL_BLOCK, BlockPool
from .request import Request
from .roster import row_of

NULL_SLOT = NULL_BLOCK  # nobody's: rows that pad a step point to it
DECODED = 4  # times state_snapshot_tokens: the distance of snapshots while a request decodes

Registered = list[tuple[BlockPool, int, bytes]]  # (pool, block, key): what has to be revoked should the step fail


@dataclass(slots=True, eq=False)
class Held:
    """What a running request has."""

    slot: int
    source: int  # the snapshot that its state begins with, referenced until the plan is made; NULL_SLOT: none
    # Tokens that its state holds when the plans so far have run, at most; while it decodes that grows with every step,
    # and here only where a boundary is near.
    folded: int
    junction: int  # tokens of the longest prefix that attention alone would have found, in whole grains
    prompt_end: int  # of those known when it starts, in whole grains
    decoded: tuple[int, bytes] | None = None  # slot and key of its newest snapshot since it decodes
    due: Pending | None = None  # the snapshot that its plans bear until one has surely passed the boundary


@dataclass(slots=True, eq=False)
class Pending:
    """A snapshot that a plan writes, which nobody can find yet."""

    request: Request
    boundary: int  # tokens
    index: int  # of the block with whose key it will be found
    slot: int
    registered: Registered  # of the step that writes it, at the latest
    decoded: bool
    written: bool = False  # when the plans given out have run

    @property
    def key(self) -> bytes | None:
        """None as long as the tokens' values have not reached the host."""
        hashes = self.request.block_hashes
        return hashes[self.index] if self.index < len(hashes) else None


class StateGroup:
    """The books on slots, over a pool of their own. `grain`: SchedulerConfig's."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_state_slots)
        self.block_size, self.grain = config.block_size, config.grain
        self.interval = lcm(DECODED * config.state_snapshot_tokens, config.block_size)
        # Who decodes and is further than this behind a boundary, by the host's count, has surely passed it.
        self.doubt = (config.depth + 1) * config.max_drafts
        self.caching, self.chunked = config.enable_prefix_caching, config.enable_chunked_prefill
        self.held: dict[int, Held] = {}  # by request id
        self.pending: list[Pending] = []
        self.coming: set[bytes] = set()  # keys of snapshots that the plan in the making writes
        self.num_restores = 0
        self.num_restored_tokens = 0  # that therefore were not computed
        self.num_exports = 0
        self.num_skipped_exports = 0  # for which no slot was free

    def match(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest prefix of these keys' blocks that there is a snapshot of."""
        find, each = self.pool.find, self.grain // self.block_size
        for length in range(len(keys) - len(keys) % each, 0, -each):
            if find(keys[length - 1]) is not None:
                return length
        return 0

    def cut(self, start: int, num_new: int, target: int, junction: int) -> int:
        """Tokens of the chunk that a step may compute instead of `num_new` behind the first `start` of `target`; 0:
        none. A chunk ends in whole grains, but for the last one, so that the same tokens give the same state however
        they are divided; and at the junction, for a step exports one snapshot of a row."""
        end = start + num_new
        if self.chunked and start < junction < end:
            return junction - start
        return num_new if end == target else max(0, end - end % self.grain - start)

    def start(self, request: Request, num_hit_tokens: int, junction: int) -> None:
        """A slot for a request that begins to run, whose state will be that of a snapshot after its first
        `num_hit_tokens`, or nothing. The caller has checked that a slot is free."""
        pool, source, slot = self.pool, NULL_SLOT, NULL_SLOT
        if num_hit_tokens:
            found = pool.find(request.block_hashes[num_hit_tokens // self.block_size - 1])
            assert found is not None, "no snapshot of the prefix that was matched"
            source = found
            self.num_restores += 1
            self.num_restored_tokens += num_hit_tokens
            if pool.num_free == 1 and pool.refs[source] == 0:  # the last one: it goes on in the snapshot's own slot
                pool.revoke(source)
                slot = source
            pool.share(source)
        if slot == NULL_SLOT:
            (slot,) = pool.take_many(1)
        prompt_end = request.num_tokens - 1
        self.held[request.id] = Held(
            slot, source, num_hit_tokens, junction - junction % self.grain, prompt_end - prompt_end % self.grain
        )

    def hand_over(self, request: Request) -> tuple[int, int]:
        """Its slot, and that of the snapshot that it is restored from (-1: none), for the plan that it begins in. Steps
        run in order: whoever gets the snapshot's slot with a later plan writes it when it has been read."""
        held = self.held[request.id]
        source, held.source = held.source, NULL_SLOT
        if source == NULL_SLOT:
            return held.slot, -1
        if source != held.slot:
            self.pool.release([source])
        return held.slot, source

    def free(self, request: Request) -> None:
        """It runs no longer. What it has surely exported will be found nevertheless."""
        held = self.held.pop(request.id)
        self.pool.release([held.slot])
        if held.due is not None:
            self._drop(lambda snapshot: snapshot is held.due)

    def export(self, request: Request, num_new: int, num_spare: int, registered: Registered) -> StateExport | None:
        """What a step that computes `num_new` tokens of this request is to write besides, None for nothing: a snapshot
        at the junction, at the end of its prompt, or one of every `interval` tokens that it decodes.

        `num_spare`: free slots that are not to be taken for that. `registered`: of the step.
        """
        start, held = request.num_computed_tokens, self.held[request.id]
        if start + 1 == request.target:  # it decodes, and folds no token of this step
            boundary, folds_to = start - start % self.interval, start
            boundary = boundary if held.folded < boundary else 0
        else:
            end = start + num_new
            folds_to = end - (end == request.target)
            boundary = next((b for b in (held.junction, held.prompt_end) if held.folded < b <= folds_to), 0)
        held.folded = max(held.folded, folds_to)
        snapshot = held.due
        if snapshot is None and boundary:
            snapshot = self._take(request, boundary, num_spare, registered, decoded=folds_to == start)
        if snapshot is None:
            return None
        held.due = snapshot
        if folds_to - request.num_in_flight_drafts >= snapshot.boundary:
            held.due, snapshot.written, snapshot.registered = None, True, registered
            self.num_exports += 1
            if snapshot.key is not None:
                self.coming.add(snapshot.key)
        return StateExport(row_of(request), snapshot.boundary, snapshot.slot)

    def _take(
        self, request: Request, boundary: int, num_spare: int, registered: Registered, decoded: bool
    ) -> Pending | None:
        """A slot for a snapshot; None: nobody needs it, or there is none."""
        if not self.caching:
            return None
        index, hashes = boundary // self.block_size - 1, request.block_hashes
        key = hashes[index] if index < len(hashes) else None
        if key is not None and (key in self.coming or self.pool.find(key) is not None):
            return None
        if self.pool.num_free <= num_spare:
            self.num_skipped_exports += 1
            return None
        (slot,) = self.pool.take_many(1)
        snapshot = Pending(request, boundary, index, slot, registered, decoded)
        self.pending.append(snapshot)
        return snapshot

    def is_coming(self, keys: Sequence[bytes]) -> bool:
        """Whether the plan in the making writes a snapshot of one of these: it can be found with the next plan."""
        return bool(self.coming) and not self.coming.isdisjoint(keys)

    def settle(self) -> None:
        """Before a plan is made: what the plans given out write can be found from now on, for the steps to come run
        behind them. A snapshot whose tokens the host does not know yet goes on waiting."""
        self.coming.clear()
        if self.pending:
            pending, self.pending = self.pending, []
            for snapshot in pending:
                if not snapshot.written or (snapshot.key is None and not snapshot.request.finished):
                    self.pending.append(snapshot)
                else:
                    self._register(snapshot)

    def _register(self, snapshot: Pending) -> None:
        key, pool, held = snapshot.key, self.pool, self.held.get(snapshot.request.id)
        if key is not None and pool.find(key) is None:
            pool.register(snapshot.slot, key)
            snapshot.registered.append((pool, snapshot.slot, key))
            if snapshot.decoded and held is not None:
                if held.decoded is not None:
                    self._forget(*held.decoded)
                held.decoded = snapshot.slot, key
        pool.release([snapshot.slot])

    def _forget(self, slot: int, key: bytes) -> None:
        """This snapshot, if it is still there: its slot is the next one that is taken."""
        if self.pool.keys[slot] == key:
            self.pool.share(slot)
            self.pool.revoke(slot)
            self.pool.release([slot])

    def drop(self, registered: Registered) -> None:
        """What the step that these belong to was to write."""
        self._drop(lambda snapshot: snapshot.registered is registered)

    def distrust(self, request: Request) -> None:
        """Forget every snapshot of a prefix of this request's, and those that are on their way."""
        keys = set(request.block_hashes)
        for key in keys:
            if (slot := self.pool.find(key)) is not None:
                self.pool.revoke(slot)
        self._drop(lambda snapshot: snapshot.request is request or snapshot.key in keys)

    def _drop(self, which: Callable[[Pending], bool]) -> None:
        gone = [snapshot for snapshot in self.pending if which(snapshot)]
        if gone:
            self.pending = [snapshot for snapshot in self.pending if snapshot not in gone]
            for held in self.held.values():
                held.due = None if held.due in gone else held.due
            self.pool.release([snapshot.slot for snapshot in gone])

    def counts(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {
            "num_state_slots": self.pool.num_blocks - 1,
            "num_state_slots_used": len(self.held),
            "num_state_snapshots": len(self.pool.by_key),
            "num_state_restores": self.num_restores,
            "num_restored_tokens": self.num_restored_tokens,
            "num_state_exports": self.num_exports,
            "num_skipped_state_exports": self.num_skipped_exports,
        }

    def check_invariants(self, running: Mapping[int, Request]) -> None:
        """Raises InvariantError unless each running request has a slot of its own, and nothing but these, snapshots on
        their way and what a plan in the making restores is referenced. O(slots)."""
        self.pool.check_invariants()
        require(self.held.keys() == running.keys(), "slots of requests that do not run, or none for one")
        refs = [0] * self.pool.num_blocks
        refs[NULL_SLOT] = 1
        for id, held in self.held.items():
            refs[held.slot] += 1
            refs[held.source] += held.source not in (NULL_SLOT, held.slot)
            most = running[id].num_computed_tokens + self.doubt  # what it was, before drafts turned out wrong
            require(held.folded <= most, f"{running[id]}: a state ahead of its tokens")
            require(held.due is None or held.due in self.pending, f"{running[id]}: a snapshot that is not on its way")
        for snapshot in self.pending:
            refs[snapshot.slot] += 1
        require(refs == self.pool.refs, "reference counts differ from the slots held and written")
        written = [held.slot for held in self.held.values()] + [snapshot.slot for snapshot in self.pending]
        require(len(set(written)) == len(written), "two write one slot")
        require(all(self.pool.keys[slot] is None for slot in written), "a slot that is written can be found")
