"""Adapters on several ranks: each reads its own share when rank 0 says so, before any step needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..errors import ModelError
from .messages import AdapterRead, Channel, ForgetAdapters, ReadAdapter, ToRank

if TYPE_CHECKING:
    import torch

    from ..adapters.layout import AdapterStore


class OtherStores:
    """Those of the other ranks, as rank 0 sees them: they hold what its own holds."""

    def __init__(self, send: Callable[[ToRank], None], ranks: Sequence[int]) -> None:
        """`send`: to all of `ranks`."""
        self._send, self._ranks = send, frozenset(ranks)
        self._reading: dict[int, tuple[dict[int, AdapterRead], asyncio.Future[None]]] = {}  # by id: answers by rank

    async def read(self, id: int, path: str, version: str) -> dict[int, str]:
        """Returns when all have read it, which version each. `version`: that it must have; "": any. Raises ModelError
        with what the first has said that cannot; then some may hold it still."""
        if not self._ranks:
            return {}
        answers: dict[int, AdapterRead] = {}
        done = asyncio.get_running_loop().create_future()
        self._reading[id] = answers, done
        self._send(ReadAdapter(id, path, version))
        try:
            await done
        finally:
            del self._reading[id]
        for rank, answer in answers.items():
            if answer.error is not None:  # perhaps on another host, which has no such folder
                raise ModelError(f"rank {rank}: {answer.error}")
        return {rank: answer.version for rank, answer in answers.items()}

    def forget(self, ids: Sequence[int]) -> None:
        """Steps that were sent before still find them."""
        if ids and self._ranks:
            self._send(ForgetAdapters(list(ids)))

    def heard(self, rank: int, message: AdapterRead) -> None:
        if message.id not in self._reading:
            return
        answers, done = self._reading[message.id]
        answers[rank] = message
        if answers.keys() == self._ranks and not done.done():
            done.set_result(None)


class RankStore:
    """On one of the other ranks: reads on a thread of its own, so that steps go on."""

    def __init__(self, store: AdapterStore, channel: Channel, device: torch.device) -> None:
        self._store, self._channel = store, channel
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-adapter", initializer=self._start)

    def read(self, message: ReadAdapter) -> None:
        self._thread.submit(self._read, message)

    def forget(self, message: ForgetAdapters) -> None:
        for id in message.ids:
            self._store.packed.pop(id, None)

    def _start(self) -> None:
        if self._device.type == "cuda":  # pinned memory is of the card that the thread has
            import torch

            torch.cuda.set_device(self._device)

    def _read(self, message: ReadAdapter) -> None:
        error, version = None, ""
        try:
            packed, adapter = self._store.read(message.path, lambda found: found.check_unchanged(message.version))
            self._store.packed[message.id], version = packed, adapter.version
        except Exception as failure:
            error = str(failure) if isinstance(failure, ModelError) else f"{type(failure).__name__}: {failure}"
        with contextlib.suppress(OSError):  # the engine is gone, and this process with it
            self._channel.send(AdapterRead(message.id, error, version))
