"""Numbers that all API processes see: each writes its own, and all read those of the others.

It is a piece of memory that the processes inherit. Each number has one writer and eight bytes, so nothing is locked;
only who is to have which place for a key is settled under a lock, when keys are read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import defaultdict
from itertools import accumulate
from typing import Protocol
from weakref import WeakSet

import numpy as np

MOST_ENGINES = 64
REQUESTS, TOKENS = 0, 1  # that this process has let in
BEATS, SERVES = 2, 3  # how often its heart has beaten (see hearts.py), and whether it takes requests
BODIES = 4  # bytes of bodies that have come and are not read yet
_COUNTERS = 5  # from here on, of the seat, whichever process has it
FINISHED_REQUESTS, FINISHED_TOKENS = 5, 6
_LOADS = 7  # from here on, of each engine: tokens of prompts that wait there, requests that are open there
_FIELDS = _LOADS + 2 * MOST_ENGINES
MOST_KEYS = 1 << 16
DIGEST = 32  # bytes
GROUPS = 1 << 12  # of tenants, by their numbers
LOCK_TRIES = 200  # a millisecond apart


class Listener(Protocol):
    def look(self, now: float) -> None: ...


class Board:
    def __init__(self, descriptor: int | None, num_seats: int, seat: int) -> None:
        """`descriptor`: of the one that the first process has made; None: this is the first one."""
        self.num_seats, self.seat = num_seats, seat
        sizes = (
            8 * num_seats * _FIELDS, 16 * num_seats * MOST_KEYS, 32 * num_seats * MOST_KEYS, 8 * num_seats * MOST_KEYS,
            16 * num_seats * GROUPS, 8 + DIGEST * MOST_KEYS,
        )  # fmt: skip
        starts = list(accumulate(sizes, initial=0))
        if descriptor is None:
            descriptor = os.memfd_create("vserve-board")
            os.ftruncate(descriptor, sum(sizes))  # pages that nobody has written take no memory
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, sum(sizes))
        self._numbers = np.frombuffer(self._memory, np.int64, sizes[0] // 8).reshape(num_seats, _FIELDS)
        self._used = np.frombuffer(self._memory, np.float64, sizes[1] // 8, starts[1]).reshape(MOST_KEYS, 2, num_seats)
        levels = np.frombuffer(self._memory, np.float64, sizes[2] // 8, starts[2])
        self._levels = levels.reshape(MOST_KEYS, 2, num_seats, 2)  # by whom: for how much a minute, the level at 0
        opened = np.frombuffer(self._memory, np.int64, sizes[3] // 8, starts[3])
        self._open = opened.reshape(MOST_KEYS, num_seats)
        shares = np.frombuffer(self._memory, np.int64, sizes[4] // 8, starts[4])
        self._shares = shares.reshape(GROUPS, num_seats, 2)
        self._count = np.frombuffer(self._memory, np.int64, 1, starts[5])
        self._digests_start = starts[5] + 8
        self.looked = 0.0  # time.monotonic()
        self._sums = np.zeros((MOST_KEYS, 2))  # of what was used, at the last look
        self._listeners: defaultdict[int, WeakSet[Listener]] = defaultdict(WeakSet)
        self._each_look: list[Listener] = []
        self._places: dict[bytes, int] = {}  # of keys, as far as they have been read from the memory

    # ---- numbers of a process ----

    def set(self, field: int, value: int) -> None:
        self._numbers[self.seat, field] = value

    def add(self, field: int, amount: int) -> None:
        self._numbers[self.seat, field] += amount

    def get(self, seat: int, field: int) -> int:
        return int(self._numbers[seat, field])

    def all(self, field: int) -> int:
        """The sum over all processes."""
        return int(self._numbers[:, field].sum())

    def others(self, field: int) -> int:
        """The sum over the other processes."""
        return self.all(field) - self.get(self.seat, field)

    def set_load(self, engine: int, waiting_tokens: int, num_open: int) -> None:
        self._numbers[self.seat, _LOADS + 2 * engine : _LOADS + 2 * engine + 2] = waiting_tokens, num_open

    def other_load(self, engine: int) -> tuple[int, int]:
        """(waiting tokens, open requests) that the other processes have at this engine."""
        start = _LOADS + 2 * engine
        column = self._numbers[:, start : start + 2]
        tokens, count = (column.sum(axis=0) - column[self.seat]).tolist()
        return tokens, count

    def clear(self, seat: int) -> None:
        """Its process is gone, and with it what it had open. What it has finished, and what keys have used, counts."""
        self._numbers[seat, :_COUNTERS] = 0
        self._numbers[seat, _LOADS:] = 0
        self._open[:, seat] = 0
        self._shares[:, seat] = 0

    # ---- what tenants have open ----

    def count_share(self, tenant: int, num_requests: int, num_tokens: int) -> None:
        self._shares[tenant % GROUPS, self.seat] += num_requests, num_tokens

    def other_share(self, tenant: int) -> tuple[int, int]:
        """(Requests, tokens) that the tenant's group has open in the other processes."""
        group = self._shares[tenant % GROUPS]
        requests, tokens = (group.sum(axis=0) - group[self.seat]).tolist()
        return requests, tokens

    def num_shares(self, tenant: int) -> int:
        """Groups with open requests, this tenant's among them. Some ten microseconds."""
        held = self._shares[:, :, 0].sum(axis=1)
        return int(np.count_nonzero(held)) + (not held[tenant % GROUPS])

    # ---- what keys have used ----

    def place(self, digest: bytes) -> int | None:
        """Of a key; None: there is no room for more keys. Raises TimeoutError where the lock could not be had."""
        if (place := self._places.get(digest)) is not None:
            return place
        self._lock()
        try:
            count = int(self._count[0])
            for index in range(len(self._places), count):  # what others have written since the last time
                self._places[self._memory[self._digest_at(index)]] = index
            if (place := self._places.get(digest)) is not None:
                return place
            if count == MOST_KEYS:
                return None
            self._memory[self._digest_at(count)] = digest
            self._places[digest] = count
            self._count[0] = count + 1
            return count
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def _lock(self) -> None:
        """Not for long: who holds it may have been stopped, and who waits has a heart that beats. Raises
        TimeoutError."""
        for _ in range(LOCK_TRIES):
            try:
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.001)
        raise TimeoutError(f"the board's lock was held elsewhere for {LOCK_TRIES} ms")

    def _digest_at(self, index: int) -> slice:
        start = self._digests_start + DIGEST * index
        return slice(start, start + DIGEST)

    def use(self, place: int, kind: int, amount: float) -> None:
        self._used[place, kind, self.seat] += amount

    def used(self, place: int, kind: int) -> float:
        """By all processes, since the server was started."""
        return float(self._used[place, kind].sum())

    def count_open(self, place: int, num_requests: int) -> None:
        self._open[place, self.seat] += num_requests

    def open(self, place: int) -> int:
        """Requests of a key that all processes have open."""
        return int(self._open[place].sum())

    def note_level(self, place: int, kind: int, per_minute: int, level: float) -> None:
        """What this process knows of a bucket, for whoever comes later: see quota.Bucket."""
        mine = self._levels[place, kind, self.seat]
        if mine[0] != per_minute:
            mine[0] = 0  # until the level is that of the new limit
        mine[1] = level
        mine[0] = per_minute

    def noted_level(self, place: int, kind: int, per_minute: int) -> float | None:
        """The lowest that any process has noted of this limit, be it gone or not; None: nobody has."""
        known = [level for limit, level in self._levels[place, kind].tolist() if limit == per_minute]
        return min(known, default=None)

    def watch(self, place: int, listener: Listener) -> None:
        """It hears at a look that something was used there since the last one."""
        self._listeners[place].add(listener)

    def watch_looks(self, listener: Listener) -> None:
        """It hears of every look."""
        self._each_look.append(listener)

    def look(self, now: float) -> None:
        """At all keys at once: a few milliseconds for as many as there may be."""
        for listener in self._each_look:
            listener.look(now)
        count = int(self._count[0])
        sums = self._used[:count].sum(axis=2)
        changed = np.flatnonzero((sums != self._sums[:count]).any(axis=1))
        for place in changed.tolist():
            for listener in list(self._listeners.get(place, ())):
                listener.look(now)
        self._sums[:count] = sums
        self.looked = now
