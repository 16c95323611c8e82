""" "Did you mean", for names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", refused: Iterable[str] = ()) -> str:
    """`; did you mean --port?`, or nothing where nothing is near. `prefix`: of what is meant, and not compared.
    `refused`: what is probably meant where it is nearer, and no help."""
    known = list(known)
    near = difflib.get_close_matches(name, [*known, *refused], n=1, cutoff=0.7)
    if near and near[0] not in known:
        return ""
    near = near or [longer for longer in known if len(name) > 4 and longer.startswith(name)][:1]
    return f"; did you mean {prefix}{near[0]}?" if near else ""
