"""Files in memory: of a bounded number, size and age, each its owner's alone. They end with the process.

Where there is no room, who holds most gives up what is oldest; who holds most and wants more is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from ..errors import ApiError, shorten

TOGETHER = 8  # one part in so many of what there may be, bytes and batches, is for other keys


@dataclass(eq=False)
class File:
    id: str
    owner: str  # the digest of a key; "": nobody's
    name: str
    purpose: str
    content: bytes | bytearray
    expires_at: int
    created_at: int = field(default_factory=lambda: int(time.time()))
    num_users: int = 0  # batches that read it or write to it: it stays
    timer: asyncio.TimerHandle | None = None  # that forgets it

    def answer(self) -> dict[str, object]:
        """As OpenAI has it."""
        return {
            "id": self.id, "object": "file", "bytes": len(self.content), "created_at": self.created_at,
            "expires_at": self.expires_at, "filename": self.name, "purpose": self.purpose, "status": "processed",
            "status_details": None,
        }  # fmt: skip


class Files:
    def __init__(self, max_files: int, max_bytes: int, lifetime: float) -> None:
        """`lifetime`: seconds that a file is kept."""
        self.max_files, self.max_bytes, self.lifetime = max_files, max_bytes, lifetime
        self.num_bytes = 0
        self._by_id: dict[str, File] = {}  # the oldest first
        self._sizes: Counter[str] = Counter()  # bytes, by owner
        self._counts: Counter[str] = Counter()

    def add(
        self, id: str, owner: str, name: str, purpose: str, content: bytes | bytearray, lifetime: float | None = None
    ) -> File:
        """Raises ApiError (400) where there is no room for it."""
        kept = self.lifetime if lifetime is None else min(lifetime, self.lifetime)
        file = File(id, owner, name, purpose, content, int(time.time() + kept))
        self._make_room(owner, len(content), 1)
        self._by_id[id] = file
        self._counts[owner] += 1
        self._count(file, len(content))
        file.timer = asyncio.get_running_loop().call_later(kept + 1, self._forget_old)
        return file

    def hold(self, file: File) -> None:
        """For a batch, until it counts itself out of `num_users`. Raises ApiError (400) where its owner's batches hold
        too much."""
        self._check_held(file.owner, 0 if file.num_users else len(file.content))
        file.num_users += 1

    def append(self, file: File, data: bytes) -> None:
        """Raises ApiError (400) where there is no room for it."""
        self._check_held(file.owner, len(data))
        self._make_room(file.owner, len(data), 0)
        assert isinstance(file.content, bytearray)
        file.content += data
        self._count(file, len(data))

    def get(self, id: str, owner: str, param: str = "file_id") -> File:
        """Raises ApiError (404)."""
        self._forget_old()
        file = self._by_id.get(id)
        if file is None or file.owner != owner:
            raise ApiError(404, f"There is no file `{shorten(id)}`.", param=param, code="not_found")
        return file

    def of(self, owner: str) -> list[File]:
        """The oldest first."""
        self._forget_old()
        return [file for file in self._by_id.values() if file.owner == owner]

    def delete(self, file: File) -> None:
        """Raises ApiError (409) where a batch has it."""
        if file.num_users:
            message = f"The file `{file.id}` is in the work of a batch: cancel that first, or wait for its end."
            raise ApiError(409, message, param="file_id", code="file_in_use")
        self._forget(file)

    def _count(self, file: File, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._sizes[file.owner] += num_bytes

    def _forget(self, file: File) -> None:
        del self._by_id[file.id]
        self._count(file, -len(file.content))
        file.content = b""  # a batch that has ended still knows of it
        if file.timer is not None:
            file.timer.cancel()
        self._counts[file.owner] -= 1
        if not self._counts[file.owner]:
            del self._counts[file.owner], self._sizes[file.owner]

    def _forget_old(self) -> None:
        now = time.time()
        for file in [file for file in self._by_id.values() if file.expires_at <= now and not file.num_users]:
            self._forget(file)

    def _check_held(self, owner: str, more: int) -> None:
        """Others find room however long this owner's batches take: what they hold, nobody can take away."""
        held = sum(len(file.content) for file in self._by_id.values() if file.num_users and file.owner == owner)
        most = self.max_bytes - self.max_bytes // TOGETHER
        if held + more > most:
            raise ApiError(
                400, f"The files of your running batches would have {held + more} bytes; of {self.max_bytes} "
                f"(--file-store-bytes) those of one key may have {most}: wait until a batch has ended.",
                code="file_store_full",
            )  # fmt: skip

    def _make_room(self, owner: str, num_bytes: int, num_files: int) -> None:
        """For so much more of this owner's. Raises ApiError (400) where no other holds more."""
        self._forget_old()
        while True:
            if self.num_bytes + num_bytes > self.max_bytes:
                held, more, most = self._sizes, num_bytes, f"{self.max_bytes} bytes (--file-store-bytes)"
            elif len(self._by_id) + num_files > self.max_files:
                held, more, most = self._counts, num_files, f"{self.max_files} (--file-store-size)"
            else:
                return
            free = [file for file in self._by_id.values() if not file.num_users]
            greediest = max((file.owner for file in free), key=held.__getitem__, default=owner)
            if greediest == owner or held[greediest] <= held[owner] + more:
                raise ApiError(
                    400, f"There is no room for another file: all together may have {most}. Delete some.",
                    code="file_store_full",
                )  # fmt: skip
            self._forget(next(file for file in free if file.owner == greediest))
