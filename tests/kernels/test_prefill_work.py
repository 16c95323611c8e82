"""The work table of a prefill step: the torch twin against a small example, the Triton kernel against the twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vserve.kernels.attention.attention_parts import RaggedBatch
from vserve.kernels.attention.prefill_work import PrefillWork, prefill_work_torch, prefill_work_triton


def int32(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def lines(work: Tensor) -> list[list[int]]:
    return work[1 : 1 + int(work[0, 0]), :5].tolist()


def test_small_example() -> None:
    """Two decodes before, a padding row, a fresh prompt of 40 tokens, the last 10 tokens of 100."""
    batch = RaggedBatch(int32([7, 3, 5]), int32([0, 40, 100]), int32([2, 2, 42, 52]), 40)
    work = prefill_work_torch(batch, 60, 16)
    assert lines(work) == [
        [5, 42, 90, 10, 100],
        [3, 34, 32, 8, 40],
        [3, 18, 16, 16, 40],
        [3, 2, 0, 16, 40],
    ]
    work = prefill_work_torch(batch, 60, 16, last_only=True)
    assert lines(work) == [[5, 42, 90, 10, 100], [3, 34, 32, 8, 40]]


CASES: dict[str, tuple[list[int], list[int], int]] = {  # query lengths, earlier context, tokens before the first
    "one": ([1], [0], 0),
    "one_block": ([32], [0], 0),
    "one_more_than_a_block": ([33], [7], 5),
    "ragged": ([5, 64, 31, 100], [0, 900, 33, 2], 3),
    "padding_rows": ([0, 20, 0, 0, 65, 0], [0, 4, 0, 0, 0, 0], 0),
    "only_padding": ([0, 0], [0, 0], 4),
    "no_request": ([], [], 4),
    "more_tokens_than_context": ([40, 70], [-8, -70], 0),
    "many_places": ([300, 0, 7, 512, 129, 1, 1, 1000, 64, 3, 90], [0] * 10 + [500], 9),
    "many_requests": ([1, 9] * 70, list(range(140)), 1),
}


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("behind", [0, 37])
@pytest.mark.parametrize("block_q", [8, 32, 128])
@pytest.mark.parametrize("case", CASES)
def test_kernel_is_the_twin(case: str, block_q: int, behind: int, last_only: bool, device: str) -> None:
    query_lens, contexts, before = CASES[case]
    query_start = torch.tensor([before, *query_lens]).cumsum(0).to(torch.int32)
    seq_lens = int32([max(context + length, 0) for context, length in zip(contexts, query_lens, strict=True)])
    rows = int32([(7 * i) % 150 for i in range(len(query_lens))])
    num_tokens = int(query_start[-1]) - before + behind
    longest = max(query_lens, default=0)
    batch = RaggedBatch(rows, seq_lens, query_start, longest)
    expected = prefill_work_torch(batch, num_tokens, block_q, last_only)
    on_device = RaggedBatch(rows.to(device), seq_lens.to(device), query_start.to(device), longest)
    work = prefill_work_triton(on_device, num_tokens, block_q, last_only)
    assert work.shape == expected.shape
    assert lines(work.cpu()) == lines(expected)
    if last_only:
        ends = {start + n for start, n in zip(query_start.tolist(), query_lens, strict=False) if n}
        assert {line[1] + line[3] for line in lines(expected)} == ends and len(lines(expected)) == len(ends)
    else:
        assert sum(line[3] for line in lines(expected)) == sum(query_lens)


def test_made_once() -> None:
    work = PrefillWork(RaggedBatch(int32([0]), int32([64]), int32([0, 64]), 64))
    assert work.table(4, 64) is work.table(4, 64)
    assert len(lines(work.table(4, 64))) == 2
    assert len(lines(work.table(8, 64))) == 4
