"""A list of objects as JSON, in pieces: bytes until somebody needs them, shared by all that begin alike, and none so
large that other threads wait while C reads it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

PIECE = 64 << 10  # bytes; an entry that is larger is a piece of its own


class _Named(msgspec.Struct):
    id: str


@dataclass(frozen=True, slots=True)
class Pieces:
    texts: tuple[bytes, ...] = ()  # each a list
    counts: tuple[int, ...] = ()  # of their entries
    num_bytes: int = 0

    @classmethod
    def of(cls, entries: Iterable[dict[str, Any]]) -> Pieces:
        texts: list[bytes] = []
        counts: list[int] = []
        waiting: list[bytes] = []
        size = 0
        for entry in map(msgspec.json.encode, entries):
            if waiting and size + len(entry) > PIECE:
                texts.append(b"[%b]" % b",".join(waiting))
                counts.append(len(waiting))
                waiting, size = [], 0
            waiting.append(entry)
            size += len(entry)
        if waiting:
            texts.append(b"[%b]" % b",".join(waiting))
            counts.append(len(waiting))
        return cls(tuple(texts), tuple(counts), sum(map(len, texts)))

    def __len__(self) -> int:
        """Entries."""
        return sum(self.counts)

    def __add__(self, other: Pieces) -> Pieces:
        return Pieces(self.texts + other.texts, self.counts + other.counts, self.num_bytes + other.num_bytes)

    def __getitem__(self, part: slice) -> Pieces:
        """Of the pieces, not of their entries."""
        texts = self.texts[part]
        return Pieces(texts, self.counts[part], sum(map(len, texts)))

    def entries(self) -> Iterator[dict[str, Any]]:
        for text in self.texts:
            yield from msgspec.json.decode(text)

    def last(self) -> list[dict[str, Any]]:
        """The last entry, where there is one."""
        entries: list[dict[str, Any]] = msgspec.json.decode(self.texts[-1])[-1:] if self.texts else []
        return entries

    def ids(self) -> list[str]:
        """Of entries that all have one."""
        return [entry.id for text in self.texts for entry in msgspec.json.decode(text, type=list[_Named])]

    def read(self, places: Sequence[int]) -> list[msgspec.Raw]:
        """The entries at these places; only their pieces are looked at."""
        ends = list(accumulate(self.counts))
        seen: dict[int, list[msgspec.Raw]] = {}
        found = []
        for place in places:
            piece = bisect_right(ends, place)
            if piece not in seen:
                seen[piece] = msgspec.json.decode(self.texts[piece], type=list[msgspec.Raw])
            found.append(seen[piece][place - ends[piece] + self.counts[piece]])
        return found

    def latest(self, num_bytes: int, num_entries: int) -> Pieces:
        """The last pieces that are within both."""
        start = len(self.texts)
        while start and (num_bytes := num_bytes - len(self.texts[start - 1])) >= 0:
            if (num_entries := num_entries - self.counts[start - 1]) < 0:
                break
            start -= 1
        return self[start:]


NONE = Pieces()
