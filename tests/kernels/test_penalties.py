"""Penalties and bias against loops over plain lists."""

from __future__ import annotations

import random

import pytest
import torch

from vserve.kernels.sampling import penalties

from .histories import history_of


@pytest.fixture(params=["torch", "triton", "public"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def apply(
    path: str,
    device: str,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *per_row: list,
    index: list[int] | None = None,
) -> torch.Tensor:
    """→ the penalised logits. per_row: rows, prompt lengths, lengths, repetition, presence, frequency. `index`: of the
    rows that are penalised, by default all. There is room for four at once."""
    where = "cpu" if path == "torch" else device
    result = logits.clone().to(where)
    tensors = [torch.tensor(values, dtype=torch.int32) for values in per_row[:3]]
    tensors += [torch.tensor(values, dtype=torch.float32) for values in per_row[3:]]
    name = "apply_penalties" if path == "public" else f"apply_penalties_{path}"
    chosen = torch.tensor(range(len(logits)) if index is None else index, dtype=torch.int32)
    counts = torch.zeros(4, logits.shape[1], dtype=torch.int32, device=where)
    tensors.append(chosen)
    history = history_of(token_ids.to(where))
    assert getattr(penalties, name)(result, history, *(x.to(where) for x in tensors), counts) is None
    assert not counts.any(), "the next rows would be penalised for these"
    return result.cpu()


def oracle(logits: list[float], history: list[int], prompt_len: int, r: float, p: float, f: float) -> list[float]:
    result, output = list(logits), history[prompt_len:]
    for token in {token for token in history if 0 <= token < len(logits)}:
        result[token] = result[token] / r if result[token] > 0 else result[token] * r
        count = output.count(token)
        if count:
            result[token] -= p + f * count
    return result


@pytest.mark.parametrize("size, limit", [(40, 25), (5000, 30), (97, 2600)])
def test_against_loops(path: str, size: int, limit: int, device: str) -> None:
    """Rows of mixed settings; histories that repeat, are empty, all prompt or all output, and leave the vocabulary."""
    rng = random.Random(size)
    num_rows = 9

    def any_token() -> int:
        return rng.choice([rng.randrange(size), rng.randrange(12), -1, size, size + 7])

    token_ids = torch.tensor([[any_token() for _ in range(limit + 4)] for _ in range(14)], dtype=torch.int32)[:, :limit]
    rows = rng.sample(range(14), num_rows)
    seq_lens = [rng.randrange(limit + 1) for _ in rows]
    seq_lens[:3] = [0, limit, limit]
    prompt_lens = [rng.randrange(length + 1) for length in seq_lens]
    prompt_lens[1], prompt_lens[3] = 0, seq_lens[3]
    settings = [(1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 0.25), (0.8, -0.7, 1.5), (1.0, 0.0, 0.0)]
    chosen = [settings[i % 5] for i in range(num_rows)]
    repetition, presence, frequency = (list(column) for column in zip(*chosen, strict=True))
    logits = torch.tensor([[rng.gauss(0, 4) for _ in range(size)] for _ in rows])
    logits[:, 3] = -float("inf")
    logits[:, 4] = 0.0
    columns = (rows, prompt_lens, seq_lens, repetition, presence, frequency)
    result = apply(path, device, logits, token_ids, *columns)
    some = rng.sample(range(num_rows), 6)
    few = apply(path, device, logits, token_ids, *columns, index=some)
    for i in range(num_rows):
        assert torch.equal(few[i], result[i] if i in some else logits[i])
    for i, row in enumerate(rows):
        history = token_ids[row, : seq_lens[i]].tolist()
        expected = torch.tensor(oracle(logits[i].tolist(), history, prompt_lens[i], *chosen[i]))
        torch.testing.assert_close(result[i], expected, rtol=2e-6, atol=1e-5)
        unseen = sorted(set(range(size)) - set(history))
        assert torch.equal(result[i, unseen], logits[i, unseen])
        if chosen[i] == (1.0, 0.0, 0.0):
            assert torch.equal(result[i], logits[i])


def test_rows_of_a_wider_buffer(path: str, device: str) -> None:
    where = "cpu" if path == "torch" else device
    buffer = torch.full((2, 12), 7.0, device=where)
    token_ids = torch.tensor([[1, 1, 2, 5]], dtype=torch.int32, device=where)
    one = torch.ones(2, device=where)
    integers = [torch.tensor(x, dtype=torch.int32, device=where) for x in ([0, 0], [1, 2], [4, 3])]
    function = getattr(penalties, "apply_penalties" if path == "public" else f"apply_penalties_{path}")
    index = torch.tensor([1, 0], dtype=torch.int32, device=where)
    counts = torch.zeros(2, 8, dtype=torch.int32, device=where)
    function(buffer[:, 2:10], history_of(token_ids), *integers, one * 2, one * 0.5, one * 0.25, index, counts)
    assert buffer.tolist() == [
        [7, 7, 7, 3.5 - 0.75, 3.5 - 0.75, 7, 7, 3.5 - 0.75, 7, 7, 7, 7],
        [7, 7, 7, 3.5, 3.5 - 0.75, 7, 7, 7, 7, 7, 7, 7],
    ]


def test_nothing_to_penalise(path: str, device: str) -> None:
    token_ids = torch.zeros(2, 8, dtype=torch.int32)
    for num_rows in (0, 3):
        logits = torch.randn(num_rows, 10)
        zeros, ones = [0] * num_rows, [1.0] * num_rows
        assert torch.equal(apply(path, device, logits, token_ids, zeros, zeros, zeros, ones, zeros, zeros), logits)
        twos = [2.0] * num_rows
        assert torch.equal(apply(path, device, logits, token_ids, zeros, zeros, zeros, twos, ones, ones), logits)


def bias(path: str, device: str, logits: torch.Tensor, biases: dict[int, dict[int, float]]) -> torch.Tensor:
    """→ the biased logits. biases: by row."""
    where = "cpu" if path == "torch" else device
    result = logits.clone().to(where)
    pairs = [pair for entries in biases.values() for pair in entries.items()]
    offsets = [sum(map(len, list(biases.values())[:i])) for i in range(len(biases) + 1)]
    values = torch.tensor([value for _, value in pairs], dtype=torch.float32).view(torch.int32)
    entries = torch.stack([torch.tensor([token for token, _ in pairs], dtype=torch.int32), values], dim=1)
    lists = [torch.tensor(x, dtype=torch.int32, device=where) for x in (list(biases), offsets)]
    name = "apply_logit_bias" if path == "public" else f"apply_logit_bias_{path}"
    assert getattr(penalties, name)(result, *lists, entries.to(where)) is None
    return result.cpu()


def test_logit_bias(path: str, device: str) -> None:
    logits = torch.arange(16.0).view(4, 4)
    result = bias(path, device, logits, {3: {}, 0: {1: 3.5}, 2: {3: -float("inf"), 0: 1.0}, 1: {0: -100.0}})
    assert result.tolist() == [[0, 4.5, 2, 3], [-96, 5, 6, 7], [9, 9, 10, -float("inf")], [12, 13, 14, 15]]
    assert torch.equal(bias(path, device, logits, {}), logits)
    assert torch.equal(bias(path, device, logits, {2: {}}), logits)


def test_long_logit_biases(path: str, device: str) -> None:
    """Of more entries than one program takes at a time; in rows of a wider buffer."""
    rng = random.Random(7)
    logits = torch.randn(3, 5000)
    biases = {row: {token: rng.gauss(0, 5) for token in rng.sample(range(5000), 2000 - row)} for row in (2, 0)}
    expected = logits.clone()
    for row, entries in biases.items():
        for token, value in entries.items():
            expected[row, token] += value
    torch.testing.assert_close(bias(path, device, logits, biases), expected)
