"""The step's inputs against loops over plain lists."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from vserve.kernels.attention import history as histories
from vserve.kernels.rows import batch_inputs

from .histories import POISON as NOTHING
from .histories import history_of, paged, ring

PATHS = ["torch", "triton", "public"]
POISON = -77


@pytest.fixture
def device(path: str, device: str) -> str:
    return "cpu" if path == "torch" else device


def function(name: str, path: str) -> Callable:
    return getattr(batch_inputs, name if path == "public" else f"{name}_{path}")


def ints(values: list | range, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def poisoned(size: int, device: str) -> torch.Tensor:
    return torch.full((size,), POISON, dtype=torch.int32, device=device)


class Batch:
    """Random tables, and a step over some of their rows with padding rows and padding tokens."""

    def __init__(self, device: str, seed: int, lengths: list[int], limit: int, num_rows: int, page: int = 16) -> None:
        rng = random.Random(seed)
        self.limit, self.num_rows, padding = limit, num_rows, 2
        self.lengths = lengths + [0] * padding
        self.rows = rng.sample(range(num_rows), len(lengths)) + [num_rows] * padding
        self.query_start = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        self.num_tokens = self.query_start[-1] + 5
        self.computed = [rng.randrange(limit) for _ in range(num_rows + 1)]
        for row, length in zip(self.rows, self.lengths, strict=True):
            self.computed[row] = rng.randrange(limit - length + 1)
        self.tokens = [[rng.randrange(1, 50000) for _ in range(limit)] for _ in range(num_rows + 1)]
        # Of some rows, everything is given; of others a part of the step's tokens, or none of these.
        self.given = [count + rng.choice([0, 0, 1, 2, 5, limit]) for count in self.computed]
        for row, length in zip(self.rows, self.lengths, strict=True):
            if length > 16:  # more than come of a ring
                self.given[row] = limit
        filed = [min(limit, max(pair)) for pair in zip(self.given, self.computed, strict=True)]
        self.history = history_of(ints(self.tokens, device), filed, page, self.given)
        self.device_computed = ints(self.computed, device)
        self.device_rows = ints(self.rows, device)
        self.device_start = ints(self.query_start, device)
        self.arguments = (self.history, self.device_computed, self.device_rows, self.device_start)

    def places(self) -> list[tuple[int, int]]:
        """(row, position) of every token of the step."""
        return [
            (row, self.computed[row] + j)
            for row, length in zip(self.rows, self.lengths, strict=True)
            for j in range(length)
        ]


CASES = [[1, 1, 1], [4, 0, 1, 7, 2], [], [1300, 2, 2500], [1] * 150]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", CASES, ids=["decode", "mixed", "empty", "long", "many"])
@pytest.mark.parametrize("page", [16, 5])
def test_inputs_and_slots(path: str, lengths: list[int], page: int, device: str) -> None:
    limit = 2600 if len(lengths) == 3 else 40
    batch = Batch(device, seed=len(lengths), lengths=lengths, limit=limit, num_rows=len(lengths) + 3, page=page)
    ids, positions = poisoned(batch.num_tokens, device), poisoned(batch.num_tokens, device)
    seq_lens = poisoned(len(batch.rows), device)
    function("build_inputs", path)(*batch.arguments, ids, positions, seq_lens)
    tokens, table = batch.places(), batch.tokens
    padding = [0] * (batch.num_tokens - len(tokens))
    assert positions.tolist() == [position for _, position in tokens] + padding
    assert ids.tolist() == [table[row][position] for row, position in tokens] + padding
    assert seq_lens.tolist() == [
        batch.computed[row] + length if length else 0 for row, length in zip(batch.rows, batch.lengths, strict=True)
    ]
    lasts = dict(zip(batch.rows, batch.lengths, strict=True))
    for row, computed in enumerate(batch.computed):
        filed = min(limit, max(batch.given[row], computed + lasts.get(row, 0)))
        assert paged(batch.history, row, limit) == table[row][:filed] + [NOTHING] * (limit - filed)

    num_blocks = -(-limit // page)
    blocks = torch.randint(1, 9999, (batch.num_rows + 1, num_blocks), dtype=torch.int32)
    slots = poisoned(batch.num_tokens, device)
    function("build_slots", path)(blocks.to(device), batch.device_rows, batch.device_start, positions, slots, page)
    wanted = [int(blocks[row, position // page]) * page + position % page for row, position in tokens]
    assert slots.tolist() == wanted + [-1] * len(padding)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page", [1, 16, 24])
def test_positions_beyond_the_tables(path: str, page: int, device: str) -> None:
    """A step scheduled one token too far reads nothing it should not, and writes no key anywhere."""
    limit = 2 * page
    history, computed = history_of(ints([[5] * limit, [9] * limit], device), page=page), ints([limit - 1, 0], device)
    history.recent[0, (limit - 1) % history.ring] = 6
    history.recent[0, limit % history.ring] = 7  # a sample that was dropped leaves what was there
    rows, query_start = ints([0], device), ints([0, 3], device)
    ids, positions, seq_lens = poisoned(4, device), poisoned(4, device), poisoned(1, device)
    function("build_inputs", path)(history, computed, rows, query_start, ids, positions, seq_lens)
    assert positions.tolist() == [limit - 1, limit, limit + 1, 0]
    assert paged(history, 0, limit) == [5] * (limit - 1) + [6] and paged(history, 1, limit) == [9] * limit
    assert ids.tolist() == [6, 0, 0, 0] and seq_lens.tolist() == [limit + 2]
    slots = poisoned(4, device)
    function("build_slots", path)(ints([[3, 4], [6, 7]], device), rows, query_start, positions, slots, page)
    assert slots.tolist() == [4 * page + page - 1, -1, -1, -1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", CASES, ids=["decode", "mixed", "empty", "long", "many"])
def test_commit(path: str, lengths: list[int], device: str) -> None:
    batch = Batch(device, seed=3, lengths=lengths, limit=2600 if len(lengths) == 3 else 40, num_rows=len(lengths) + 2)
    before, pages = batch.history.recent.tolist(), batch.history.pages.clone()
    # Every other request samples, in an order of its own; padding rows carry an index that must not matter.
    samplers = [i for i, length in enumerate(batch.lengths) if length and i % 2 == 0]
    index = [0 if length == 0 else -1 for length in batch.lengths]
    for place, i in enumerate(reversed(samplers)):
        index[i] = place
    sampled = ints(range(60000, 60000 + max(1, len(samplers))), device)
    function("commit_tokens", path)(*batch.arguments, sampled, ints(index, device))
    expected, computed = before, list(batch.computed)
    for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
        computed[row] += length
        if length and index[i] >= 0 and computed[row] < batch.limit:
            expected[row][computed[row] % batch.history.ring] = 60000 + index[i]
    assert batch.device_computed.tolist() == computed
    assert batch.history.recent.tolist() == expected and torch.equal(batch.history.pages, pages)


@pytest.mark.parametrize("path", PATHS)
def test_commit_drops_a_sample_without_room(path: str, device: str) -> None:
    history, computed = history_of(ints([[1, 2, 3], [4, 5, 6], [0, 0, 0]], device)), ints([2, 1, 0], device)
    rows, query_start = ints([0, 1, 2], device), ints([0, 1, 2, 2], device)
    function("commit_tokens", path)(history, computed, rows, query_start, ints([8, 9], device), ints([0, 1, 0], device))
    assert computed.tolist() == [3, 2, 0]
    assert ring(history, 1, 2, 1) == [9] and (history.recent != NOTHING).sum() == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [[3], [5, 0, 1, 2], [], [3000, 1, 1100], [0, 0]])
@pytest.mark.parametrize("offset", [0, 4])
def test_scatter_rows(path: str, lengths: list[int], offset: int, device: str) -> None:
    rng = random.Random(sum(lengths))
    num_rows, limit = len(lengths) + 2, max([*lengths, 10]) + 7
    table = torch.full((num_rows, limit + 2), POISON, dtype=torch.int32, device=device)[:, :limit]
    rows = rng.sample(range(num_rows), len(lengths))
    starts = [rng.randrange(limit - length + 1) for length in lengths]
    offsets = [offset + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    values = [rng.randrange(1 << 30) for _ in range(offsets[-1] + 3)]  # a staging buffer is longer than its contents
    function("scatter_rows", path)(table, *(ints(x, device) for x in (rows, starts, offsets, values)))
    expected = [[POISON] * limit for _ in range(num_rows)]
    for i, length in enumerate(lengths):
        expected[rows[i]][starts[i] : starts[i] + length] = values[offsets[i] : offsets[i + 1]]
    assert table.tolist() == expected


@pytest.mark.parametrize("path", PATHS)
def test_two_writes_to_one_row(path: str, device: str) -> None:
    table = torch.zeros(2, 8, dtype=torch.int32, device=device)
    writes = ([1, 1, 0], [0, 4, 7], [0, 2, 5, 6], [1, 2, 3, 4, 5, 6])
    function("scatter_rows", path)(table, *(ints(x, device) for x in writes))
    assert table.tolist() == [[0, 0, 0, 0, 0, 0, 0, 6], [1, 2, 0, 0, 3, 4, 5, 0]]


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_generation_by_tables_alone(path: str, device: str) -> None:
    """Prefill in chunks, then decode: what the steps read is the history that a list would have kept."""
    prompts, limit = {2: [7, 8, 9, 10, 11], 0: [20, 21]}, 12
    history = history_of(torch.full((4, limit), POISON, dtype=torch.int32, device=device), [0] * 4, 4, [2, 0, 5, 0])
    computed = torch.zeros(4, dtype=torch.int32, device=device)
    flat = [token for prompt in prompts.values() for token in prompt]
    blocks = [int(history.table[row, page]) for row, page in ((2, 0), (2, 1), (0, 0))]
    function("scatter_rows", path)(
        history.pages, ints(blocks, device), ints([0] * 3, device), ints([0, 4, 5, 7], device), ints(flat, device)
    )
    known = {row: list(prompt) for row, prompt in prompts.items()}
    done = dict.fromkeys(prompts, 0)
    for step in range(8):
        rows = [2, 0, 3]
        lengths = [min(2 if step < 2 else 1, len(known[row]) - done[row]) for row in rows[:2]] + [0]
        query_start = [0, lengths[0], sum(lengths), sum(lengths)]
        ids, positions, seq_lens = poisoned(6, device), poisoned(6, device), poisoned(3, device)
        arguments = (history, computed, ints(rows, device), ints(query_start, device))
        function("build_inputs", path)(*arguments, ids, positions, seq_lens)
        wanted = [token for row, n in zip(rows[:2], lengths, strict=False) for token in known[row][done[row] :][:n]]
        assert ids.tolist() == wanted + [0] * (6 - len(wanted))
        finished = [done[row] + n == len(known[row]) for row, n in zip(rows[:2], lengths, strict=False)]
        index = [i if ready else -1 for i, ready in enumerate(finished)]
        sampled = [100 + 2 * step, 101 + 2 * step]
        function("commit_tokens", path)(*arguments, ints(sampled, device), ints([*index, -1], device))
        for i, row in enumerate(rows[:2]):
            done[row] += lengths[i]
            if finished[i] and len(known[row]) < limit:
                known[row].append(sampled[i])
    for row in (2, 0):
        assert history.tokens(row, len(known[row]), done[row]).tolist() == known[row]
        assert paged(history, row, done[row]) == known[row][: done[row]]
    assert {*paged(history, 1, limit), *paged(history, 3, limit)} == {NOTHING}, "of nobody"


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_tokens_are_read_from_pages_and_behind_them_from_the_ring(path: str, device: str) -> None:
    rng = random.Random(8)
    limit, computed = 700, [0, 699, 16, 15, 300, 5]
    tokens = [[rng.randrange(50000) for _ in range(limit)] for _ in computed]
    history = history_of(ints(tokens, device), computed)
    rows = [4, 1, 0, 5]
    owners = [rng.randrange(4) for _ in range(900)]
    positions = [rng.randrange(min(limit, computed[rows[owner]] + 16)) for owner in owners]
    known = ints([computed[row] for row in rows], device)
    read = getattr(histories, f"read_tokens_{path}")
    found = read(history, ints(rows, device), known, torch.tensor(owners, device=device), ints(positions, device))
    wanted = [tokens[rows[owner]][position] for owner, position in zip(owners, positions, strict=True)]
    assert found.tolist() == wanted and found.dtype == torch.int32
    assert len(read(history, ints(rows, device), known, ints([], device), ints([], device))) == 0
