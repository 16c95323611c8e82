"""Token masks against a loop over single bits."""

from __future__ import annotations

import pytest
import torch

from vserve.kernels.sampling import masks


@pytest.fixture(params=["torch", "triton", "public"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def apply(path: str, device: str, logits: torch.Tensor, rows: list[int], bits: torch.Tensor) -> torch.Tensor:
    where = "cpu" if path == "torch" else device
    result = logits.clone().to(where)
    name = "apply_token_mask" if path == "public" else f"apply_token_mask_{path}"
    index = torch.tensor(rows, dtype=torch.int32, device=where)
    assert getattr(masks, name)(result, index, bits.to(where)) is None
    return result.cpu()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 300, 4095, 4097, 9001])
def test_against_a_loop_over_bits(path: str, size: int, device: str, rng: torch.Generator) -> None:
    words = -(-size // 32)
    bits = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64, generator=rng).to(torch.int32)
    bits[1] = 0
    bits[2] = -1
    logits = torch.randn(5, size, generator=rng)
    logits[:, size // 2] = float("inf")
    rows = [4, 1, 2]
    result = apply(path, device, logits, rows, bits)
    for i, row in enumerate(rows):
        allowed = [bits[i, token // 32].item() >> (token % 32) & 1 for token in range(size)]
        pairs = zip(logits[row].tolist(), allowed, strict=True)
        expected = torch.tensor([logit if ok else -float("inf") for logit, ok in pairs])
        assert torch.equal(result[row], expected)
    assert torch.equal(result[[0, 3]], logits[[0, 3]])


def test_nothing_to_mask(path: str, device: str) -> None:
    logits = torch.randn(3, 70)
    assert torch.equal(apply(path, device, logits, [], torch.empty(0, 3, dtype=torch.int32)), logits)


def test_rows_of_wider_buffers(path: str, device: str) -> None:
    """Neither what surrounds the logits nor a wider mask's other words count."""
    where = "cpu" if path == "torch" else device
    buffer = torch.zeros(2, 50, device=where)
    bits = torch.tensor([[7, 7, 0b101], [7, 7, -2]], dtype=torch.int32, device=where)[:, 2:]
    rows = torch.tensor([1, 0], dtype=torch.int32, device=where)
    function = getattr(masks, "apply_token_mask" if path == "public" else f"apply_token_mask_{path}")
    function(buffer[:, 5:10], rows, bits)
    inf = float("inf")
    assert buffer[1].tolist() == [0] * 6 + [-inf, 0, -inf, -inf] + [0] * 40
    assert buffer[0].tolist() == [0] * 5 + [-inf] + [0] * 44
