"""What a client has sent, for as long as it may have to be sent on again."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ..http.body_limit import HeldBody

PIECE = 256 << 10  # bytes


class Body:
    """Iterated for each request that is made of it: httpx keeps what it is given until the answer has ended, and so
    would keep the bytes themselves."""

    def __init__(self, content: bytes, held: HeldBody | None) -> None:
        self.content = content
        self._held = held

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = self.content
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]

    def drop(self) -> None:
        """Nobody is sent it any more. Idempotent."""
        self.content = b""
        if self._held is not None:
            self._held.release()
