"""Penalties and bias against loops over plain lists."""

from __future__ import annotations

import random

import pytest
import torch

from vserve.kernels import penalties


@pytest.fixture(params=["torch", "triton", "public"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def apply(path: str, device: str, logits: torch.Tensor, token_ids: torch.Tensor, *per_row: list) -> torch.Tensor:
    """→ the penalised logits. per_row: rows, prompt lengths, lengths, repetition, presence, frequency."""
    where = "cpu" if path == "torch" else device
    result = logits.clone().to(where)
    tensors = [torch.tensor(values, dtype=torch.int32) for values in per_row[:3]]
    tensors += [torch.tensor(values, dtype=torch.float32) for values in per_row[3:]]
    name = "apply_penalties" if path == "public" else f"apply_penalties_{path}"
    assert getattr(penalties, name)(result, token_ids.to(where), *(x.to(where) for x in tensors)) is None
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
    result = apply(path, device, logits, token_ids, rows, prompt_lens, seq_lens, repetition, presence, frequency)
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
    function(buffer[:, 2:10], token_ids, *integers, one * 2, one * 0.5, one * 0.25)
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


def test_logit_bias(device: str) -> None:
    logits = torch.arange(12.0, device=device).view(3, 4)
    entries = [(0, 1, 2.5), (2, 3, -float("inf")), (0, 1, 1.0), (1, 0, -100.0)]
    index, tokens = (torch.tensor([entry[i] for entry in entries], device=device) for i in (0, 1))
    penalties.apply_logit_bias(logits, index, tokens, torch.tensor([entry[2] for entry in entries], device=device))
    assert logits.tolist() == [[0, 4.5, 2, 3], [-96, 5, 6, 7], [8, 9, 10, -float("inf")]]
    empty = torch.empty(0, dtype=torch.int64, device=device)
    penalties.apply_logit_bias(logits, empty, empty, torch.empty(0, device=device))
    assert logits[0].tolist() == [0, 4.5, 2, 3]
