"""Forbidden words against loops over plain lists."""

from __future__ import annotations

import random

import pytest
import torch

from vserve.kernels.sampling import masks

from .histories import history_of


@pytest.fixture(params=["torch", "triton", "public"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def apply(path: str, device: str, logits: torch.Tensor, token_ids: torch.Tensor, *lists: list[int]) -> torch.Tensor:
    """→ the masked logits. lists: rows, prompt lengths, lengths, index, offsets, words."""
    where = "cpu" if path == "torch" else device
    result = logits.clone().to(where)
    tensors = [torch.tensor(values, dtype=torch.int32, device=where) for values in lists]
    name = "apply_bad_words" if path == "public" else f"apply_bad_words_{path}"
    assert getattr(masks, name)(result, history_of(token_ids.to(where), page=5), *tensors) is None
    return result.cpu()


def flatten(words: list[tuple[int, list[int]]]) -> tuple[list[int], list[int], list[int]]:
    index, offsets, tokens = [], [0], []
    for row, word in words:
        index.append(row)
        tokens += word
        offsets.append(len(tokens))
    return index, offsets, tokens


def forbidden(history: list[int], prompt_len: int, words: list[list[int]], size: int) -> set[int]:
    output, found = history[prompt_len:], set()
    for word in words:
        if word and len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]:
            found.add(word[-1])
    return {token for token in found if 0 <= token < size}


@pytest.mark.parametrize("size, limit, longest", [(6, 20, 4), (3, 200, 90), (50, 8, 2)])
def test_against_loops(path: str, size: int, limit: int, longest: int, device: str) -> None:
    """Words short and long, taken from the output and not, of rows with much, little and no output."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_masked = 0
    for _ in range(10):
        token_ids = torch.tensor([[rng.randrange(size) for _ in range(limit)] for _ in range(9)], dtype=torch.int32)
        rows = rng.sample(range(9), 6)
        seq_lens = [rng.randint(1, limit) for _ in rows]
        prompt_lens = [rng.randint(0, length) for length in seq_lens]
        prompt_lens[0], prompt_lens[1] = 0, seq_lens[1]
        words: list[tuple[int, list[int]]] = []
        for _ in range(40):
            row = rng.randrange(5)  # the last one has none
            length = rng.randint(0, longest)
            word = [rng.randrange(size) for _ in range(length)]
            if rng.random() < 0.7:  # the very end of the history, and one more
                history = token_ids[rows[row], : seq_lens[row]].tolist()
                word = [*history[len(history) - length :], rng.choice([*range(size), size, -1])]
            words.append((row, word))
        logits = torch.randn(len(rows), size)
        result = apply(path, device, logits, token_ids, rows, prompt_lens, seq_lens, *flatten(words))
        for i, row in enumerate(rows):
            history = token_ids[row, : seq_lens[i]].tolist()
            masked = forbidden(history, prompt_lens[i], [word for at, word in words if at == i], size)
            expected = logits[i].clone()
            expected[list(masked)] = float("-inf")
            assert torch.equal(result[i], expected)
            num_masked += len(masked)
    assert num_masked > 20


def test_rows_of_a_wider_buffer(path: str, device: str) -> None:
    where = "cpu" if path == "torch" else device
    buffer = torch.zeros(2, 9, device=where)
    token_ids = torch.tensor([[4, 1, 2, 3]], dtype=torch.int32, device=where)
    lists = [[0, 0], [1, 2], [4, 3], *flatten([(0, [2, 3, 0]), (1, [1, 2, 4]), (1, [2, 4]), (0, [])])]
    function = getattr(masks, "apply_bad_words" if path == "public" else f"apply_bad_words_{path}")
    function(buffer[:, 2:7], history_of(token_ids), *(torch.tensor(x, dtype=torch.int32, device=where) for x in lists))
    # The word (1, 2, 4) begins in the prompt of the second row.
    assert (buffer == -float("inf")).nonzero().tolist() == [[0, 2], [1, 6]]


def test_no_words(path: str, device: str) -> None:
    logits = torch.randn(2, 5)
    token_ids = torch.zeros(3, 4, dtype=torch.int32)
    assert torch.equal(apply(path, device, logits, token_ids, [0, 1], [1, 1], [2, 2], [], [0], [0]), logits)
