"""Answers that were told to be stored, for those who go on from them: a bounded number, the latest used stay. Who
stores most makes room, so that nobody's many answers drive out another's few."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from ..wire.encoded import encode
from .pieces import NONE, Pieces

if TYPE_CHECKING:
    from .responses.events import ResponseEvents
    from .responses.log import EventLog


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes, beside what is asked for without looking into them."""

    answer: bytes  # JSON, as it was answered; metadata come last
    messages: Pieces  # the conversation up to its end, whose pieces those that go on from it share
    items: Pieces = NONE  # what a response was made of, in the words of its API
    said: Pieces = NONE  # the items of its output
    log: EventLog | None = None  # its events, where it ran in the background and was streamed
    model: str = ""
    status: str = ""  # of a response
    metadata: dict[str, str] = field(default_factory=dict)
    number: int = 0  # later ones have larger ones

    @classmethod
    def of(
        cls, answer: dict[str, Any], messages: Pieces = NONE, items: Pieces = NONE, log: EventLog | None = None
    ) -> Stored:
        labels = answer.get("metadata") or {}
        rest = {name: value for name, value in answer.items() if name != "metadata"}
        return cls(
            bytes(encode({**rest, "metadata": labels})), messages, items, Pieces.of(answer.get("output", ())), log,
            answer.get("model", ""), answer.get("status", ""), labels,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Bytes; what is shared counts for each."""
        pieces = self.messages.num_bytes + self.items.num_bytes + self.said.num_bytes
        return len(self.answer) + pieces + (0 if self.log is None else self.log.num_bytes)

    @property
    def all_items(self) -> Pieces:
        """What a response that goes on from it was made of before its own."""
        return self.items + self.said

    def relabelled(self, metadata: dict[str, str]) -> Stored:
        end = len(self.answer) - len(msgspec.json.encode(self.metadata)) - 1
        return replace(self, answer=b"%b%b}" % (self.answer[:end], msgspec.json.encode(metadata)), metadata=metadata)


class _Share:
    """One owner's, the least recently used first."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.stored: OrderedDict[str, Stored] = OrderedDict()


class Store:
    def __init__(self, max_answers: int, max_bytes: int) -> None:
        """0 answers: nothing is stored. An owner is the digest of a key: nobody else gets what is its."""
        self.num_bytes = 0
        # responses that are under way, by owner and id
        self.running: WeakValueDictionary[tuple[str, str], ResponseEvents] = WeakValueDictionary()
        self._max_answers = max_answers
        self.max_bytes = max_bytes
        self.num_log_bytes = 0  # events of responses that run in the background
        self._shares: dict[str, _Share] = {}  # by owner
        self._numbers = count()
        self._lock = Lock()  # an answer with many log-probabilities is made on a thread

    def streamed(self, id: str, owner: str) -> ResponseEvents | None:
        """One that is under way."""
        stream = self.running.get((owner, id))
        return None if stream is None or stream.generation.closed else stream

    def largest_log(self) -> ResponseEvents | None:
        """Of the owner whose running responses have most bytes of events, the one that has most of them."""
        logs = [
            (owner, events, events.log.num_bytes)
            for (owner, _), events in self.running.items()
            if events.log is not None and not events.generation.closed
        ]
        sizes: Counter[str] = Counter()
        for owner, _, size in logs:
            sizes[owner] += size
        greediest = max(logs, key=lambda log: (sizes[log[0]], log[2]), default=None)
        return None if greediest is None else greediest[1]

    def __len__(self) -> int:
        return sum(len(share.stored) for share in self._shares.values())

    def put(self, id: str, owner: str, stored: Stored) -> None:
        """Forgets, of the owner who has most, those that were not used for longest; the new one itself where it alone
        is too large."""
        with self._lock:
            self._keep(id, owner, replace(stored, number=next(self._numbers)))

    def _keep(self, id: str, owner: str, stored: Stored) -> None:
        """With the lock."""
        if not self._max_answers or stored.size > self.max_bytes:
            return
        if id in self._shares.get(owner, _Share()).stored:
            self._forget(owner, id)  # clients may choose the id of a chat
        share = self._shares.setdefault(owner, _Share())
        share.stored[id] = stored
        share.num_bytes += stored.size
        self.num_bytes += stored.size
        while len(self) > self._max_answers:
            self._forget_oldest(max(self._shares, key=lambda owner: len(self._shares[owner].stored)))
        while self.num_bytes > self.max_bytes:
            self._forget_oldest(max(self._shares, key=lambda owner: self._shares[owner].num_bytes))

    def _forget_oldest(self, owner: str) -> None:
        self._forget(owner, next(iter(self._shares[owner].stored)))

    def _forget(self, owner: str, id: str) -> None:
        share = self._shares[owner]
        size = share.stored.pop(id).size
        share.num_bytes -= size
        self.num_bytes -= size
        if not share.stored:
            del self._shares[owner]

    def get(self, id: str, owner: str) -> Stored | None:
        with self._lock:
            share = self._shares.get(owner)
            if share is None or id not in share.stored:
                return None
            share.stored.move_to_end(id)
            return share.stored[id]

    def delete(self, id: str, owner: str) -> bool:
        """Whether it was there."""
        with self._lock:
            share = self._shares.get(owner)
            if share is None or id not in share.stored:
                return False
            self._forget(owner, id)
            return True

    def all_of(self, owner: str) -> list[tuple[str, Stored]]:
        """In no order that means anything; none of them counts as used."""
        with self._lock:
            share = self._shares.get(owner)
            return [] if share is None else list(share.stored.items())

    def relabel(self, id: str, owner: str, stored: Stored, metadata: dict[str, str]) -> bytes:
        """The answer of one that is there, with other metadata from now on."""
        renewed = stored.relabelled(metadata)
        self.renew(id, owner, stored, renewed)
        return renewed.answer

    def renew(self, id: str, owner: str, stored: Stored, renewed: Stored) -> bool:
        """Whether `stored` was still there, in whose place the other is now."""
        with self._lock:
            share = self._shares.get(owner)
            if share is None or share.stored.get(id) is not stored:  # it was deleted or replaced meanwhile
                return False
            self._keep(id, owner, renewed)
            return True
