"""What an answer says of fields that nobody here knows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import shorten

IGNORED_HEADER = "x-vserve-ignored-params"
MOST = 20  # names; a header has an end


def ignored_headers(names: Sequence[str]) -> dict[str, str]:
    """Headers that list the names of fields that were ignored, as a header may hold them."""
    if not names:
        return {}
    safe = [re.sub(r"[^A-Za-z0-9_.-]", "?", shorten(name)) for name in names[:MOST]]
    return {IGNORED_HEADER: ", ".join(safe if len(names) <= MOST else [*safe, "..."])}
