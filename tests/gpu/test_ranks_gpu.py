"""Sums over cards, through NCCL and through memory that they share: `GROUP=ranks`. Needs two cards of one host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]


def run(size: int, mode: str) -> list[str]:
    script = Path(__file__).with_name("rank_on_card.py")
    command = [sys.executable, str(script), str(size), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    print(done.stdout)
    return done.stdout.splitlines()


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_nccl(size: int) -> None:
    """Every size, to those that NCCL takes over; the same bits on every rank."""
    assert len(run(size, "sums")) == size


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_are_late(size: int) -> None:
    """By milliseconds, in turn; launched, and in CUDA graphs with NCCL's collectives among them."""
    assert len(run(size, "late")) == size


def test_what_it_takes() -> None:
    """µs in bf16, in CUDA graphs: the fused sum is no slower than NCCL's with the norm behind it."""
    found = [json.loads(line) for line in run(2, "times")]
    assert len(found) == 2 * 8
    for row in found:
        assert row["norm alone"] < row["fused"] <= 1.1 * row["nccl"], row
