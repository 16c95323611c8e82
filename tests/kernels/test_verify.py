"""Which drafts hold, against a loop over plain lists."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from vserve.kernels.sampling import verify

from .histories import history_of

PATHS = ["torch", "triton", "public"]


def function(path: str) -> Callable:
    return getattr(verify, "verify_drafts" if path == "public" else f"verify_drafts_{path}")


def ints(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("num_rows", [1, 5, 150])
def test_drafts_hold_up_to_the_first_that_was_not_sampled(
    path: str, num_rows: int, num_drafts: int, device: str
) -> None:
    rng = random.Random(num_rows + num_drafts)
    limit, padding = 40, 2
    table = [[rng.randrange(1, 9) for _ in range(limit)] for _ in range(num_rows + 3)]
    computed = [rng.randrange(limit - 1) for _ in table]
    computed[0] = limit - 2  # of its drafts one lies within the row, and what follows nowhere
    proposed = [rng.randrange(num_drafts + 2) for _ in table]
    rows = [0, *rng.sample(range(1, num_rows + 2), num_rows - 1)]
    query_len = 1 + num_drafts
    order = rng.sample(range(num_rows), num_rows)  # whose samples lie where
    sampled = [rng.randrange(1, 9) for _ in range(num_rows * query_len + 4)]
    for i, row in enumerate(rows):  # most drafts are right
        for place in range(num_drafts):
            if rng.random() < 0.7 and computed[row] + 1 + place < limit:
                sampled[order[i] * query_len + place] = table[row][computed[row] + 1 + place]
    history = history_of(ints(table, device), computed)
    expected, counts, kept = history.recent.tolist(), list(computed), []
    for i, row in enumerate(rows):
        samples = sampled[order[i] * query_len :][:query_len]
        drafts = table[row][computed[row] + 1 : limit][:num_drafts]
        right = 0
        while right < len(drafts) and samples[right] == drafts[right]:
            right += 1
        counts[row] += 1 + right
        if counts[row] < limit:
            expected[row][counts[row] % history.ring] = samples[right]
        kept.append(1 + right)

    device_computed, out = (
        ints(computed, device),
        torch.full((2, num_rows + padding), -77, dtype=torch.int32).to(device),
    )
    query_start = [*range(0, num_rows * query_len + 1, query_len), *[num_rows * query_len] * padding]
    function(path)(
        history, device_computed, ints(proposed, device), ints([*rows, *[num_rows + 2] * padding], device),
        ints(query_start, device), ints(sampled, device),
        ints([place * query_len for place in order] + [0] * padding, device), out, num_drafts,
    )  # fmt: skip
    assert history.recent.tolist() == expected
    assert device_computed.tolist() == counts
    assert out.tolist() == [[*kept, 0, 0], [*(proposed[row] for row in rows), 0, 0]]
    assert len(set(kept)) > 1 or num_rows == 1, "the same for all: nothing was tried"


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_an_imposed_acceptance_is_what_was_asked_for_whatever_was_sampled(path: str, device: str) -> None:
    """And is the same on both paths: a hash of seed and position decides."""
    rng = random.Random(3)
    num_rows, num_drafts, limit, rates = 300, 4, 24, (1.0, 0.7, 0.7, 0.1)
    table = [[rng.randrange(9) for _ in range(limit)] for _ in range(num_rows + 1)]
    computed = [rng.randrange(limit - 1) for _ in table]
    seeds = [rng.randrange(-(1 << 31), 1 << 31) for _ in table]
    samples = [rng.randrange(9) for _ in range((num_rows + 1) * (1 + num_drafts))]
    thresholds = torch.tensor([round(rate * (1 << 32)) for rate in rates], dtype=torch.int64).to(device)
    found = []
    for how in ("torch", path):
        history, sampled = history_of(ints(table, device), computed), ints(samples, device)
        rows, index = ints([*range(num_rows), num_rows], device), ints([*range(0, 5 * num_rows, 5), 0], device)
        start = ints([*range(0, 5 * num_rows + 1, 5), 5 * num_rows], device)  # the last is padding
        params = ints([[seed, 0, 0] for seed in seeds], device)
        counts, proposed = ints(computed, device), ints([0] * len(table), device)
        getattr(verify, f"impose_acceptance_{how}")(
            history, counts, params[:, 0], rows, start, sampled, index, thresholds, num_drafts
        )
        kept = ints([[0] * (num_rows + 1)] * 2, device)
        verify.verify_drafts_torch(history, counts, proposed, rows, start, sampled, index, kept, num_drafts)
        now = [history.tokens(row, min(limit, computed[row] + 16), computed[row]).tolist() for row in range(len(table))]
        found.append((now, sampled.tolist(), counts.tolist(), kept[0].tolist()))
    assert found[0] == found[1]
    table_now, samples_now, _, kept_now = found[1]
    assert table_now[num_rows] == table[num_rows][: len(table_now[num_rows])] and kept_now[-1] == 0
    whole = [kept_now[row] - 1 for row in range(num_rows) if computed[row] + 1 + num_drafts < limit]
    for place, rate in enumerate(rates):
        assert sum(right > place for right in whole) / len(whole) == pytest.approx(rate, abs=0.1), place
    for row, right in enumerate(kept_now[:num_rows]):
        first = computed[row] + 1
        drafts = table[row][first : first + right - 1]
        assert samples_now[5 * row :][: right - 1] == drafts == table_now[row][first : first + right - 1]
