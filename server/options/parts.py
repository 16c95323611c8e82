"""Options whose value is a JSON object, given key by key: `--hf-overrides.rope_theta 1e6`."""

from __future__ import annotations

import contextlib
import json
from typing import Any


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """`a.b` = value in nested objects; a text that is JSON counts as what it says. Raises ValueError when `a` is there
    and no object, or `a.b` is there."""
    *above, last = path.split(".")
    for key in above:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{key} has a value, and parts too: leave one out")
    if not last or last in tree:
        raise ValueError(f"{last} is given twice: leave one out" if last else "a name is missing after the dot")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    tree[last] = value
