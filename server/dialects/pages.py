"""A part of a list, as clients of OpenAI's API ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..errors import bad_request, shorten

MOST = 100  # of a page


class Entry(Protocol):
    id: str

    def answer(self) -> dict[str, Any]: ...


def newest(entries: Sequence[Entry], query: Mapping[str, str]) -> dict[str, Any]:
    """The page of `entries`, the oldest first, that the query asks for; the newest first where it does not say."""
    ids = [entry.id for entry in entries]
    return page(ids, query, "desc", lambda places: [entries[place].answer() for place in places])


def page(
    ids: Sequence[str], query: Mapping[str, str], order: str, read: Callable[[Sequence[int]], Sequence[Any]]
) -> dict[str, Any]:
    """The entries that the query asks for: `order` (asc or desc, which `order` is where it does not say), `after`,
    `limit`. `ids`: of all entries, the oldest first; `read`: those at some places. Raises ApiError (400).
    """
    asked = query.get("order", order)
    if asked not in ("asc", "desc"):
        raise bad_request(f"'order' must be asc or desc, but it is {shorten(asked)!r}.", "order")
    places = range(len(ids)) if asked == "asc" else range(len(ids) - 1, -1, -1)
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise bad_request(f"'after' is {shorten(after)!r}, which is not in the list.", "after")
        places = places[places.index(ids.index(after)) + 1 :]
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST):
        raise bad_request(f"'limit' is {shorten(limit)!r}; it must be from 1 to {MOST}.", "limit")
    shown = places[: int(limit)]
    return {
        "object": "list",
        "data": list(read(shown)),
        "first_id": ids[shown[0]] if shown else None,
        "last_id": ids[shown[-1]] if shown else None,
        "has_more": len(shown) < len(places),
    }
