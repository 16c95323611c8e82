"""The batches of a server: begun, found, ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from ..errors import ApiError, shorten
from ..options.batches import BatchConfig
from .batch import Batch, Work
from .files import TOGETHER, Files


class Batches:
    def __init__(self, config: BatchConfig) -> None:
        self.config = config
        self.files = Files(config.file_store_size, config.file_store_bytes, config.file_lifetime)
        self.turns = asyncio.Semaphore(config.batch_concurrency)
        self._by_id: dict[str, Batch] = {}  # the oldest first

    def begin(self, batch: Batch, work: Work) -> asyncio.Task[None]:
        """Raises ApiError (429) where too many are under way, (400) where they hold too much."""
        self._make_room(batch.owner)
        self.files.hold(batch.file)
        self._by_id[batch.id] = batch
        batch.task = asyncio.create_task(batch.run(work))
        batch.task.add_done_callback(batch.settle)
        return batch.task

    def get(self, id: str, owner: str) -> Batch:
        """Raises ApiError (404)."""
        self._forget_old()
        batch = self._by_id.get(id)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"There is no batch `{shorten(id)}`.", param="batch_id", code="not_found")
        return batch

    def of(self, owner: str) -> list[Batch]:
        """The oldest first."""
        self._forget_old()
        return [batch for batch in self._by_id.values() if batch.owner == owner]

    def _forget_old(self) -> None:
        limit = time.time() - self.config.file_lifetime
        for batch in [one for one in self._by_id.values() if one.has_ended and one.times[one.status] <= limit]:
            del self._by_id[batch.id]

    def _make_room(self, owner: str) -> None:
        """Whose are most gives up the oldest that has ended. Raises ApiError (429)."""
        self._forget_old()
        most = self.config.max_batches
        running = sum(batch.owner == owner and not batch.has_ended for batch in self._by_id.values())
        if running >= max(1, most - most // TOGETHER):  # others find room, however long these take
            raise ApiError(
                429, f"{running} of your batches are under way; of {most} (--max-batches) one key may have no more: "
                "try again when one has ended.", type="rate_limit_error", code="too_many_batches",
                headers={"retry-after": "60"},
            )  # fmt: skip
        if len(self._by_id) < most:
            return
        held = Counter(batch.owner for batch in self._by_id.values())
        ended = [batch for batch in self._by_id.values() if batch.has_ended]
        greediest = max((batch.owner for batch in ended), key=held.__getitem__, default=None)
        if greediest is None or held[greediest] < held[owner]:
            raise ApiError(
                429, f"There are {len(self._by_id)} batches, and no more may be (--max-batches): try again when one "
                "has ended.", type="rate_limit_error", code="too_many_batches", headers={"retry-after": "60"},
            )  # fmt: skip
        del self._by_id[next(batch.id for batch in ended if batch.owner == greediest)]
