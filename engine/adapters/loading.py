"""What the engine's loop does about adapters: takes them in, has them read when somebody waits for one, drops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..messages import AdapterLoaded, DropAdapter, LoadAdapter
from ..model_file import ModelError
from .adapter import Adapter
from .book import AdapterBook
from .layout import Packed
from .store import AdapterStore

logger = logging.getLogger(__name__)


class AdapterLoading:
    """On the loop's thread, but for the reading, which has a thread of its own."""

    def __init__(
        self, store: AdapterStore, book: AdapterBook, send: Callable[[AdapterLoaded], None],
        failed: Callable[[int, str], None], wake: Callable[[], None],
    ) -> None:  # fmt: skip
        """`failed` gets (id, why) of an adapter that requests wait for and that can no longer be read."""
        self._store, self._book = store, book
        self._send, self._failed, self._wake = send, failed, wake
        self._reading: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-adapter")
        self.with_head: set[int] = set()  # adapters that change logits

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def load(self, message: LoadAdapter) -> None:
        self._book.paths[message.id] = message.path
        self._book.names[message.id] = message.name
        self._read(message.id, first=True)

    def drop(self, message: DropAdapter) -> None:
        self._store.packed.pop(message.id, None)
        self.with_head.discard(message.id)
        self._book.remove(message.id)

    def knows(self, id: int) -> bool:
        return id in self._book.paths

    def fetch(self) -> None:
        """Has those read that requests wait for, in their order, as far as the host has room."""
        for id in list(self._book.wanted):
            if id in self._reading or id not in self._book.paths:
                continue
            if not self._make_room():
                return
            self._book.coming.add(id)  # the room is its own
            self._read(id)

    def _make_room(self) -> bool:
        leaving = self._book.make_room()
        for id in leaving or ():
            del self._store.packed[id]
        return leaving is not None

    def _read(self, id: int, first: bool = False) -> None:
        self._reading.add(id)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._store.read, self._book.paths[id])
        future.add_done_callback(lambda done: self._done(id, first, done))

    def _done(self, id: int, first: bool, done: asyncio.Future[tuple[Packed, Adapter]]) -> None:
        self._reading.discard(id)
        has_room = id in self._book.coming
        self._book.coming.discard(id)
        if done.cancelled() or id not in self._book.paths:
            return
        if (error := done.exception()) is not None:
            if not isinstance(error, ModelError):
                logger.error("adapter %s cannot be read", self._book.paths[id], exc_info=error)
            said = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
            self._book.wanted.pop(id, None)
            if first:
                self._book.remove(id)
                self._send(AdapterLoaded(id, error=said))
            self._failed(id, said)
            self._wake()
            return
        packed, adapter = done.result()
        if packed.has_head:
            self.with_head.add(id)
        if has_room or self._make_room():
            self._store.packed[id] = packed
            self._book.arrived(id)
        if first:
            self._send(AdapterLoaded(id, packed.rank, adapter.config.base))
        self._wake()
