"""How much memory pictures on their way take: files that were fetched, and pixels until their request is over."""

from __future__ import annotations

from collections import Counter

from ..errors import ApiError

MOST = 2 << 30  # bytes of all requests of one API process
SHARE = MOST - MOST // 8  # the most of one tenant


class Room:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_tenant: Counter[int] = Counter()  # those with none have no entry

    def count(self, tenant: int, num_bytes: int) -> None:
        """Raises ApiError (429) where more would be held than there is room for."""
        own = self._by_tenant[tenant] + num_bytes
        if num_bytes > 0 and (own > SHARE or self.num_bytes + num_bytes > MOST):
            raise ApiError(
                429,
                f"The room for pictures is used up: all together may have {MOST} bytes of pixels, one key or address "
                f"{SHARE}, and this one has {own}; send fewer or smaller ones at a time, and try again in 1 s.",
                type="rate_limit_error",
                code="too_many_pictures_held",
                headers={"retry-after": "1"},
            )
        self.num_bytes += num_bytes
        self._by_tenant[tenant] = own
        if not own:
            del self._by_tenant[tenant]


class Held:
    """What the pictures of one request take."""

    def __init__(self, room: Room, tenant: int) -> None:
        self._room = room
        self._tenant = tenant
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """By a negative number too. Raises ApiError (429) as `Room.count` does, and then nothing is counted."""
        self._room.count(self._tenant, num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Idempotent."""
        self.grow(-self.num_bytes)
