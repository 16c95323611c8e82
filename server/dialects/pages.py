"""A part of a list, as clients of OpenAI's API ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import bad_request, shorten

MOST = 100  # of a page


def page(entries: Sequence[dict[str, Any]], query: Mapping[str, str], order: str) -> dict[str, Any]:
    """The entries that the query asks for: `order` (asc or desc, which `order` is where it does not say), `after`,
    `limit`. `entries`: each with an id, the oldest first. Raises ApiError (400).
    """
    asked = query.get("order", order)
    if asked not in ("asc", "desc"):
        raise bad_request(f"'order' must be asc or desc, but it is {shorten(asked)!r}.", "order")
    left = list(entries if asked == "asc" else reversed(entries))
    if (after := query.get("after")) is not None:
        ids = [entry["id"] for entry in left]
        if after not in ids:
            raise bad_request(f"'after' is {shorten(after)!r}, which is not in the list.", "after")
        left = left[ids.index(after) + 1 :]
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST):
        raise bad_request(f"'limit' is {shorten(limit)!r}; it must be from 1 to {MOST}.", "limit")
    shown = left[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(left),
    }
