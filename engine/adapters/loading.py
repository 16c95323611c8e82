"""What the engine's loop does about adapters: takes them in, has them read when a request waits for one, drops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from ..errors import ModelError
from ..link.messages import AdapterLoaded, DropAdapter, LoadAdapter
from .adapter import AGAIN, Adapter
from .book import AdapterBook
from .layout import AdapterStore, Packed
from .peft_files import AdapterError, Stamp

logger = logging.getLogger(__name__)


class Others(Protocol):
    """The stores of the other ranks: see ranks/adapters.py."""

    async def read(self, id: int, path: str, version: str) -> dict[int, str]: ...

    def forget(self, ids: Sequence[int]) -> None: ...


class AdapterLoading:
    """On the loop's thread, but for the reading, which has a thread of its own."""

    def __init__(
        self, store: AdapterStore, book: AdapterBook, send: Callable[[AdapterLoaded], None],
        failed: Callable[[int], None], wake: Callable[[], None], others: Others | None = None,
    ) -> None:  # fmt: skip
        """`failed` gets the id of an adapter that requests wait for and that can no longer be read; why is logged, as
        it names folders. `others`: the stores of the other ranks."""
        self._store, self._book, self._others = store, book, others
        self._send, self._failed, self._wake = send, failed, wake
        self._reading: dict[int, asyncio.Task[tuple[Packed, Adapter]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-adapter")
        # Of those that are loaded, what they were then: version and stamp; the latter is () where an engine before this
        # one has loaded it.
        self._loaded: dict[int, tuple[str, Stamp]] = {}
        self.with_head: set[int] = set()  # adapters that change logits

    def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def load(self, message: LoadAdapter) -> None:
        """One that is known is not read again: of several API processes, each tells an engine that starts again."""
        if self.knows(message.id):
            return
        self._book.paths[message.id] = message.path
        self._book.names[message.id] = message.name
        self._loaded[message.id] = message.version, ()
        self._read(message.id, first=True)

    def drop(self, message: DropAdapter) -> None:
        self._forget([message.id])
        self.with_head.discard(message.id)
        self._loaded.pop(message.id, None)
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
        self._forget(leaving or ())
        return leaving is not None

    def _forget(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._store.packed.pop(id, None)
        if self._others is not None:
            self._others.forget(ids)

    def _read(self, id: int, first: bool = False) -> None:
        self._reading[id] = task = asyncio.create_task(self._read_everywhere(id, self._book.paths[id]))
        task.add_done_callback(lambda done: self._done(id, first, done))

    async def _read_everywhere(self, id: int, path: str) -> tuple[Packed, Adapter]:
        """By all ranks at the same time. It must be what was loaded: slots and cached prefixes may have what it was.
        Raises what rank 0 raises, else what another does."""
        version, stamp = self._loaded.get(id, ("", ()))
        check = partial(Adapter.check_unchanged, version=version, stamp=stamp)
        mine = asyncio.get_running_loop().run_in_executor(self._thread, self._store.read, path, check)
        if self._others is None:
            return await mine
        found, theirs = await asyncio.gather(mine, self._others.read(id, path, version), return_exceptions=True)
        if isinstance(found, BaseException):
            raise found
        if isinstance(theirs, BaseException):
            raise theirs
        for rank, other in theirs.items():  # files may be replaced between two reads, and hosts may have their own
            if other != found[1].version:
                raise AdapterError(
                    f"rank {rank} has read another version of {path} than rank 0: give all hosts the same files, and "
                    f"{AGAIN}"
                )
        return found

    def _done(self, id: int, first: bool, done: asyncio.Task[tuple[Packed, Adapter]]) -> None:
        del self._reading[id]
        has_room = id in self._book.coming
        self._book.coming.discard(id)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None or id not in self._book.paths:
            self._forget([id])  # some ranks may have read it
        if id not in self._book.paths:
            return
        if error is not None:
            expected = isinstance(error, ModelError)
            said = str(error) if expected else f"{type(error).__name__}: {error}"
            if not (first and expected):  # then the load of it says so
                name = self._book.names.get(id) or self._book.paths[id]
                logger.error("adapter %s cannot be used: %s", name, said, exc_info=None if expected else error)
            self._book.wanted.pop(id, None)
            if first:
                self._book.remove(id)
                self._loaded.pop(id, None)
                self._send(AdapterLoaded(id, error=said))
            self._failed(id)
            self._wake()
            return
        packed, adapter = done.result()
        if packed.has_head:
            self.with_head.add(id)
        if has_room or self._make_room():
            self._store.packed[id] = packed
            self._book.arrived(id)
        else:
            self._forget([id])
        if first:
            self._loaded[id] = adapter.version, adapter.stamp
            self._send(AdapterLoaded(id, packed.rank, adapter.config.base, version=adapter.version))
        self._wake()
