"""Which adapters there are, which of them are in the host's memory and which in a slot of the device. No tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from ..errors import require
from ..link.plan import AdapterCopy

PATIENCE = 64  # requests with adapters in slots that may pass one that waits for a slot


class AdapterBook:
    """An adapter has an id of its own for each time it was loaded; 0 is none.

    A slot is taken by a request that starts, and free again, with its content, once no running request has its adapter:
    the one that was used longest ago makes room. Plans are executed in order, so a slot may change hands while steps in
    flight still read it.
    """

    def __init__(self, num_slots: int, max_on_host: int) -> None:
        self.num_slots, self.max_on_host = num_slots, max(max_on_host, num_slots)
        self.on_host: OrderedDict[int, None] = OrderedDict()  # by last use
        self.slots: OrderedDict[int, int] = OrderedDict()  # id → slot, by last use
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.running: Counter[int] = Counter()  # requests on a row, by adapter
        self.wanted: OrderedDict[int, None] = OrderedDict()  # adapters that requests wait for, to be read from disk
        self.coming: set[int] = set()  # of these, those that are being read: the host has room for them
        self.fetched: set[int] = set()  # adapters read for a request that has not begun yet: they stay until then
        self.paths: dict[int, str] = {}  # of all that requests may name
        self.names: dict[int, str] = {}  # what clients call them
        self.busy: Callable[[], set[int]] = set  # adapters that steps in flight have
        self._waiter: int | None = None  # the first request of this pass, by its id, that waits for a slot
        # How many have started past one that was the first to wait, until it leaves the queue. Of each its own: tenants
        # take turns, so that another's may be the first in the next pass, and there may be no row free in some passes.
        self._passes: Counter[int] = Counter()

    # ---- what is there ----
    def remove(self, id: int) -> None:
        """No request has it any more."""
        self.paths.pop(id, None)
        self.names.pop(id, None)
        self.wanted.pop(id, None)
        self.on_host.pop(id, None)
        self.fetched.discard(id)
        if id in self.slots:
            self.free_slots.append(self.slots.pop(id))

    def make_room(self) -> list[int] | None:
        """For one more on the host: those that have to leave it; None: all are in use, or will be soon."""
        kept = self.busy() | self.running.keys() | self.fetched
        num_too_many = len(self.on_host) + len(self.coming) + 1 - self.max_on_host
        leaving = [id for id in self.on_host if id not in kept][: max(0, num_too_many)]
        if len(leaving) < num_too_many:
            return None
        for id in leaving:
            self.on_host.pop(id)
        return leaving

    def arrived(self, id: int) -> None:
        """It is on the host."""
        self.coming.discard(id)
        if id in self.wanted:
            del self.wanted[id]
            self.fetched.add(id)
        self.on_host[id] = None
        self.on_host.move_to_end(id)

    # ---- requests ----
    def begin_pass(self) -> None:
        """Over the queue, from its head."""
        self._waiter = None

    def may_start(self, id: int, request: int) -> bool:
        """Whether this request with this adapter, or none, could run now. One that cannot waits, and lets others pass;
        but only PATIENCE of those that keep slots, or the host's room, from it."""
        if not id:
            return True
        patient = self._waiter is None or self._passes[self._waiter] < PATIENCE
        if id in self.running:
            return patient
        if id not in self.slots and id not in self.on_host:
            self.wanted.setdefault(id)
            if id not in self.coming:
                self._wait(request)
            return False
        if len(self.running) == self.num_slots:
            self._wait(request)
            return False
        # What was fetched keeps others from the host until it has begun: it never waits for them.
        return patient or id in self.fetched

    def start(self, id: int, request: int) -> tuple[int, AdapterCopy | None]:
        """→ the slot of a request that starts, and what has to be copied there first."""
        if self._waiter is not None:
            self._passes[self._waiter] += 1
        self.leave(id, request)
        self.running[id] += 1
        if id in self.on_host:
            self.on_host.move_to_end(id)
        if (slot := self.slots.get(id)) is not None:
            self.slots.move_to_end(id)
            return slot, None
        if not self.free_slots:
            self.free_slots.append(self.slots.pop(next(other for other in self.slots if other not in self.running)))
        self.slots[id] = slot = self.free_slots.pop()
        return slot, AdapterCopy(slot, id, self.paths[id])

    def stop(self, id: int) -> None:
        """A request has left its row."""
        self.running[id] -= 1
        if not self.running[id]:
            del self.running[id]

    def leave(self, id: int, request: int) -> None:
        """The request has left the queue, to run or to end."""
        self.fetched.discard(id)
        self._passes.pop(request, None)

    def _wait(self, request: int) -> None:
        if self._waiter is None:
            self._waiter = request

    def forget(self, ids: set[int]) -> None:
        """The copies of these into their slots may have failed: they are copied anew."""
        for id in ids & self.slots.keys():
            if id not in self.running:
                self.free_slots.append(self.slots.pop(id))

    def check(self, running: Counter[int]) -> None:
        """Raises InvariantError; `running`: adapters of the requests on rows."""
        require(self.running == running, "requests with adapters miscounted")
        require(len(self.running) <= self.num_slots, "more adapters run than there are slots")
        require(sorted([*self.slots.values(), *self.free_slots]) == list(range(self.num_slots)), "a slot was lost")
        require(self.running.keys() <= self.slots.keys(), "an adapter runs without a slot")
        require(len(self.on_host) + len(self.coming) <= self.max_on_host, "more adapters on the host than fit")
        require(self.fetched <= self.on_host.keys(), "an adapter that is kept is not on the host")
