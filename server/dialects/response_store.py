"""Responses that were told to be stored, for those who go on from them: a bounded number, the latest used stay."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

if TYPE_CHECKING:
    from .responses_events import ResponseEvents


@dataclass(frozen=True, slots=True)
class Stored:
    owner: str  # the digest of the key that it was made with; nobody else gets it
    response: bytes  # JSON, as it was answered
    messages: bytes  # JSON, the conversation up to its end; each one has all of it, so that none needs another

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)

    def conversation(self) -> list[dict[str, Any]]:
        return msgspec.json.decode(self.messages)


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """0 responses: nothing is stored."""
        self.num_bytes = 0
        # streams that are under way, by owner and id
        self.running: WeakValueDictionary[tuple[str, str], ResponseEvents] = WeakValueDictionary()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._lock = Lock()  # a response with many log-probabilities is made on a thread

    def streamed(self, id: str, owner: str) -> ResponseEvents | None:
        """One that is under way."""
        stream = self.running.get((owner, id))
        return None if stream is None or stream.generation.closed else stream

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, id: str, owner: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Forgets those that were not used for longest; the new one itself where it alone is too large."""
        stored = Stored(owner, msgspec.json.encode(response), msgspec.json.encode(messages))
        if not self._max_responses or stored.size > self._max_bytes:
            return
        with self._lock:
            self._stored[id] = stored
            self.num_bytes += stored.size
            while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
                _, oldest = self._stored.popitem(last=False)
                self.num_bytes -= oldest.size

    def get(self, id: str, owner: str) -> Stored | None:
        with self._lock:
            stored = self._stored.get(id)
            if stored is None or stored.owner != owner:
                return None
            self._stored.move_to_end(id)
            return stored

    def delete(self, id: str, owner: str) -> bool:
        """Whether it was there."""
        with self._lock:
            stored = self._stored.get(id)
            if stored is None or stored.owner != owner:
                return False
            del self._stored[id]
            self.num_bytes -= stored.size
            return True
