"""Drafts by n-grams, against a search that a reader believes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from vserve.kernels.sampling import ngram

from .histories import history_of, paged

PATHS = ["torch", "triton", "public"]


def function(path: str) -> Callable:
    return getattr(ngram, "propose_ngrams" if path == "public" else f"propose_ngrams_{path}")


def plain(history: list[int], least: int, most: int, count: int) -> list[int]:
    """No drafts: no match."""
    for size in range(most, least - 1, -1):
        for end in range(len(history) - 1, size - 1, -1):  # where an earlier match ends
            if history[end - size : end] == history[-size:]:
                return [history[end + place % (len(history) - end)] for place in range(count)]
    return []


def ints(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("least", "most", "count"), [(1, 1, 1), (2, 4, 7), (5, 5, 3), (1, 15, 15)])
def test_drafts(path: str, least: int, most: int, count: int, device: str) -> None:
    rng = random.Random(least + most)
    limit, lengths = 1400, [1, 2, 3, 30, 1024, 1025, 1026, 1390, 1400, 7]
    table = [[rng.randrange(rng.choice([2, 3, 300])) for _ in range(limit + 2)] for _ in range(len(lengths) + 3)]
    for length, row in zip(lengths, table, strict=False):  # long matches, across the borders of blocks
        size = min(rng.randrange(1, 20), length // 3)
        if size:
            place = rng.randrange(length - 2 * size)
            row[place : place + size] = row[length - size : length]
    computed = [length - 1 for length in lengths] + [5, 6, 0]
    rows = [*rng.sample(range(len(lengths)), len(lengths)), len(lengths), len(lengths) + 2]
    samples = [*range(len(lengths)), -1, -1]  # of a prompt that goes on, and padding
    before = [9] * len(table)

    computed = [min(count, limit) for count in computed]
    history, proposed = history_of(ints([row[:limit] for row in table], device), computed), ints(before, device)
    pages, recent = [paged(history, row, limit) for row in range(len(table))], history.recent.tolist()
    found = torch.full((len(rows),), -77, dtype=torch.int32).to(device)
    function(path)(
        history, ints(computed, device), ints(rows, device), ints(samples, device), proposed, found,
        least, most, count,
    )  # fmt: skip
    wanted = []
    for row, sample in zip(rows, samples, strict=True):
        if sample < 0:
            wanted.append(0)
            continue
        length = computed[row] + 1
        drafts = plain(table[row][:length], least, most, count)
        wanted.append(count if drafts else 0)
        before[row] = wanted[-1]
        drafts = (drafts or [table[row][length - 1]] * count)[: limit - length]
        for place, draft in enumerate(drafts):
            recent[row][(length + place) % history.ring] = draft
    assert found.tolist() == wanted and proposed.tolist() == before
    assert history.recent.tolist() == recent and [paged(history, row, limit) for row in range(len(table))] == pages
    assert 0 < sum(number > 0 for number in wanted) < len(wanted), "all, or none: nothing was tried"
