"""Decoded pictures that may come again, as a conversation's do with each of its turns."""

from __future__ import annotations

from collections import OrderedDict

from ...engine.link.media import MediaItem


class PictureCache:
    """By a key of the file and of whoever may find it; what nobody asked for for longest goes first. For one thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.num_queries = self.num_hits = 0
        self._items: OrderedDict[bytes, MediaItem] = OrderedDict()
        self._names: OrderedDict[bytes, bytes] = OrderedDict()  # of clients, and the keys that they mean

    def find(self, key: bytes) -> MediaItem | None:
        self.num_queries += 1
        if (item := self._items.get(key)) is not None:
            self._items.move_to_end(key)
            self.num_hits += 1
        return item

    def named(self, name: bytes) -> MediaItem | None:
        """What was put under this name last, if that is still here."""
        key = self._names.get(name)
        return None if key is None else self.find(key)

    def put(self, key: bytes, item: MediaItem, name: bytes | None = None) -> None:
        if len(item.pixels) > self.most_bytes:
            return
        if key not in self._items:
            self._items[key] = item
            self.num_bytes += len(item.pixels)
        if name is not None:
            self._names[name] = key
            self._names.move_to_end(name)
        while self.num_bytes > self.most_bytes:
            _, oldest = self._items.popitem(last=False)
            self.num_bytes -= len(oldest.pixels)
        while len(self._names) > max(1024, 2 * len(self._items)):
            self._names.popitem(last=False)
