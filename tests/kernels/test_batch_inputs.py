"""The step's inputs against loops over plain lists."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from vserve.kernels import batch_inputs

PATHS = ["torch", "triton", "public"]
POISON = -77


def function(name: str, path: str) -> Callable:
    return getattr(batch_inputs, name if path == "public" else f"{name}_{path}")


def ints(values: list | range, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def poisoned(size: int, device: str) -> torch.Tensor:
    return torch.full((size,), POISON, dtype=torch.int32, device=device)


class Batch:
    """Random tables, and a step over some of their rows with padding rows and padding tokens."""

    def __init__(self, device: str, seed: int, lengths: list[int], limit: int, num_rows: int, padding: int = 2) -> None:
        rng = random.Random(seed)
        self.limit, self.num_rows = limit, num_rows
        self.lengths = lengths + [0] * padding
        self.rows = rng.sample(range(num_rows), len(lengths)) + [num_rows] * padding
        self.query_start = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        self.num_tokens = self.query_start[-1] + 5
        self.computed = [rng.randrange(limit) for _ in range(num_rows + 1)]
        for row, length in zip(self.rows, self.lengths, strict=True):
            self.computed[row] = rng.randrange(limit - length + 1)
        # Wider than the tables in use, as a view into something larger would be.
        self.token_ids = torch.tensor(
            [[rng.randrange(1, 50000) for _ in range(limit + 3)] for _ in range(num_rows + 1)], dtype=torch.int32
        ).to(device)[:, :limit]
        self.device_computed = ints(self.computed, device)
        self.device_rows = ints(self.rows, device)
        self.device_start = ints(self.query_start, device)
        self.arguments = (self.token_ids, self.device_computed, self.device_rows, self.device_start)

    def tokens(self) -> list[tuple[int, int]]:
        """(row, position) of every token of the step."""
        return [
            (row, self.computed[row] + j)
            for row, length in zip(self.rows, self.lengths, strict=True)
            for j in range(length)
        ]


CASES = [[1, 1, 1], [4, 0, 1, 7, 2], [], [1300, 2, 2500], [1] * 150]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", CASES, ids=["decode", "mixed", "empty", "long", "many"])
def test_inputs_and_slots(path: str, lengths: list[int], device: str) -> None:
    page, limit = 16, 2600 if len(lengths) == 3 else 40
    batch = Batch(device, seed=len(lengths), lengths=lengths, limit=limit, num_rows=len(lengths) + 3)
    ids, positions = poisoned(batch.num_tokens, device), poisoned(batch.num_tokens, device)
    seq_lens = poisoned(len(batch.rows), device)
    function("build_inputs", path)(*batch.arguments, ids, positions, seq_lens)
    tokens, table = batch.tokens(), batch.token_ids.tolist()
    padding = [0] * (batch.num_tokens - len(tokens))
    assert positions.tolist() == [position for _, position in tokens] + padding
    assert ids.tolist() == [table[row][position] for row, position in tokens] + padding
    assert seq_lens.tolist() == [
        batch.computed[row] + length if length else 0 for row, length in zip(batch.rows, batch.lengths, strict=True)
    ]

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
    token_ids, computed = ints([[5] * limit, [9] * limit], device), ints([limit - 1, 0], device)
    rows, query_start = ints([0], device), ints([0, 3], device)
    ids, positions, seq_lens = poisoned(4, device), poisoned(4, device), poisoned(1, device)
    function("build_inputs", path)(token_ids, computed, rows, query_start, ids, positions, seq_lens)
    assert positions.tolist() == [limit - 1, limit, limit + 1, 0]
    assert ids.tolist() == [5, 0, 0, 0] and seq_lens.tolist() == [limit + 2]
    slots = poisoned(4, device)
    function("build_slots", path)(ints([[3, 4], [6, 7]], device), rows, query_start, positions, slots, page)
    assert slots.tolist() == [4 * page + page - 1, -1, -1, -1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", CASES, ids=["decode", "mixed", "empty", "long", "many"])
def test_commit(path: str, lengths: list[int], device: str) -> None:
    batch = Batch(device, seed=3, lengths=lengths, limit=2600 if len(lengths) == 3 else 40, num_rows=len(lengths) + 2)
    before = batch.token_ids.clone()
    # Every other request samples, in an order of its own; padding rows carry an index that must not matter.
    samplers = [i for i, length in enumerate(batch.lengths) if length and i % 2 == 0]
    index = [0 if length == 0 else -1 for length in batch.lengths]
    for place, i in enumerate(reversed(samplers)):
        index[i] = place
    sampled = ints(range(60000, 60000 + max(1, len(samplers))), device)
    function("commit_tokens", path)(*batch.arguments, sampled, ints(index, device))
    expected, computed = before.tolist(), list(batch.computed)
    for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
        computed[row] += length
        if length and index[i] >= 0 and computed[row] < batch.limit:
            expected[row][computed[row]] = 60000 + index[i]
    assert batch.device_computed.tolist() == computed
    assert batch.token_ids.tolist() == expected


@pytest.mark.parametrize("path", PATHS)
def test_commit_drops_a_sample_without_room(path: str, device: str) -> None:
    token_ids, computed = ints([[1, 2, 3], [4, 5, 6], [0, 0, 0]], device), ints([2, 1, 0], device)
    rows, query_start = ints([0, 1, 2], device), ints([0, 1, 2, 2], device)
    function("commit_tokens", path)(
        token_ids, computed, rows, query_start, ints([8, 9], device), ints([0, 1, 0], device)
    )
    assert computed.tolist() == [3, 2, 0]
    assert token_ids.tolist() == [[1, 2, 3], [4, 5, 9], [0, 0, 0]]


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
    token_ids = torch.full((4, limit), POISON, dtype=torch.int32, device=device)
    computed = torch.zeros(4, dtype=torch.int32, device=device)
    flat = [token for prompt in prompts.values() for token in prompt]
    function("scatter_rows", path)(
        token_ids, ints(list(prompts), device), ints([0, 0], device), ints([0, 5, 7], device), ints(flat, device)
    )
    history = {row: list(prompt) for row, prompt in prompts.items()}
    done = dict.fromkeys(prompts, 0)
    for step in range(8):
        rows = [2, 0, 3]
        lengths = [min(2 if step < 2 else 1, len(history[row]) - done[row]) for row in rows[:2]] + [0]
        query_start = [0, lengths[0], sum(lengths), sum(lengths)]
        ids, positions, seq_lens = poisoned(6, device), poisoned(6, device), poisoned(3, device)
        arguments = (token_ids, computed, ints(rows, device), ints(query_start, device))
        function("build_inputs", path)(*arguments, ids, positions, seq_lens)
        wanted = [token for row, n in zip(rows[:2], lengths, strict=False) for token in history[row][done[row] :][:n]]
        assert ids.tolist() == wanted + [0] * (6 - len(wanted))
        finished = [done[row] + n == len(history[row]) for row, n in zip(rows[:2], lengths, strict=False)]
        index = [i if ready else -1 for i, ready in enumerate(finished)]
        sampled = [100 + 2 * step, 101 + 2 * step]
        function("commit_tokens", path)(*arguments, ints(sampled, device), ints([*index, -1], device))
        for i, row in enumerate(rows[:2]):
            done[row] += lengths[i]
            if finished[i] and len(history[row]) < limit:
                history[row].append(sampled[i])
    assert token_ids[2, : len(history[2])].tolist() == history[2]
    assert token_ids[0, : len(history[0])].tolist() == history[0]
    assert (token_ids[[1, 3]] == POISON).all()
