"""Of a test with three or more lists of parameters, the cases in which each two values of two lists meet.

A fault of a kernel shows at one value or where two of them meet; what three of them do is for `make test-all`, which
runs the whole product. The rest is marked slow, and `product`, by which `make test-gpu` leaves it to a
group of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = tuple[tuple[int, ...], ...]  # a value of each list; which one it is, its identity says


def covering(cases: Sequence[Case]) -> list[int]:
    """Which of these suffice for all pairs that are in any of them: always the one that has most of the missing ones.

    Cases need not be a whole product.
    """
    pairs = [frozenset((*one, *other) for one, other in combinations(enumerate(case), 2)) for case in cases]
    missing = frozenset().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(pairs[number] & missing), -number))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def lists_of(item: pytest.Function) -> list[list[str]]:
    """The names of each list: several may be of one, `parametrize("rows, size", …)`. A fixture's parameters are one."""
    named = [mark.args[0] for mark in item.iter_markers("parametrize")]
    lists = [[one.strip() for one in names.split(",")] if isinstance(names, str) else list(names) for names in named]
    known = {name for names in lists for name in names}
    return lists + [[name] for name in item.callspec.params if name not in known]


def mark_the_rest(items: Iterable[Any]) -> None:
    by_test: defaultdict[str, list[tuple[pytest.Function, Case]]] = defaultdict(list)
    for item in items:
        if getattr(item, "callspec", None) is None or item.get_closest_marker("slow"):
            continue
        lists = lists_of(item)
        if len(lists) > 2:
            case = tuple(tuple(id(item.callspec.params[name]) for name in names) for names in lists)
            by_test[item.nodeid.partition("[")[0]].append((item, case))
    for cases in by_test.values():
        kept = set(covering([case for _, case in cases]))
        for number, (item, _) in enumerate(cases):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.product)
