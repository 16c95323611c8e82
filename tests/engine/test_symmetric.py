"""How ranks come to memory that all of them reach: together, or none. The memory itself is tests/gpu's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from vserve.engine.parallel.symmetric import MOST_ROWS, SymmetricGroup, reach_each_other
from vserve.kernels.norm.all_reduce import ABSENT_16, Exchange


class Memory:
    """Of two ranks, of which this is the first; the other writes its number into ours when it is asked to."""

    offset = 0

    def __init__(self, arrives: bool = True, full: bool = False) -> None:
        self.arrives, self.full = arrives, full
        self.taken = 0
        self.buffers: list[torch.Tensor] = []

    def empty(self, size: int, **_: Any) -> torch.Tensor:
        if self.full:
            raise RuntimeError("CUDA driver error: out of memory\nand more lines")
        self.taken = size
        self.buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        return self.buffers[0]

    def rendezvous(self, buffer: torch.Tensor, group: Any) -> Memory:
        return self

    @property
    def buffer_ptrs(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self.buffers]

    def get_buffer(self, rank: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        self.buffers[0][1] = 2 if self.arrives else 0  # what the other has written meanwhile
        return self.buffers[rank][: shape[0]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    def prepare(memory: Memory, row_bytes: int = 8192, others: Any = lambda turn: True) -> SymmetricGroup:
        """others(turn): whether the other rank has taken this step."""
        turns: list[int] = []

        def all_reduce(done: torch.Tensor, op: Any, group: Any) -> None:
            assert op == dist.ReduceOp.MIN
            turns.append(0)
            if not others(len(turns)):
                done.zero_()

        from torch.distributed import _symmetric_memory

        for name in ("empty", "rendezvous"):
            monkeypatch.setattr(_symmetric_memory, name, getattr(memory, name))
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(empty_cache=lambda: None, synchronize=lambda device: None))
        group = SymmetricGroup.__new__(SymmetricGroup)
        group.group, group.rank, group.size, group.device = object(), 0, 2, torch.device("cpu")
        group.most_bytes, group.exchange = 72 << 20, None
        group.prepare(row_bytes)
        return group

    return prepare


@pytest.mark.parametrize(("row_bytes", "rows"), [(8192, MOST_ROWS), (16384, 4608), (1024, MOST_ROWS)])
def test_all_reach_it(prepared: Any, row_bytes: int, rows: int) -> None:
    memory = Memory()
    exchange = prepared(memory, row_bytes).exchange
    assert (exchange.rank, exchange.max_rows, exchange.row_bytes) == (0, rows, row_bytes)
    assert memory.taken == Exchange.buffer_bytes(2, rows, row_bytes) <= 144 << 20
    assert exchange.buffers.tolist() == memory.buffer_ptrs
    assert bool((memory.buffers[0].view(torch.int16) == ABSENT_16.value).all()), "and nothing has come"
    assert memory.buffers[1][0] == 1, "the other finds our number"


def test_a_card_without_room(prepared: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert prepared(Memory(full=True)).exchange is None
    assert "cannot be shared (CUDA driver error: out of memory): NCCL makes all sums" in caplog.text


def test_what_does_not_arrive(prepared: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert prepared(Memory(arrives=False)).exchange is None
    assert "did not come: [1, 0] instead of [1, 2]" in caplog.text


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_another_rank_cannot(prepared: Any, caplog: pytest.LogCaptureFixture, turn: int) -> None:
    """Whatever it fails at: this one sums through NCCL too."""
    assert prepared(Memory(), others=lambda now: now != turn).exchange is None and caplog.text == ""


@pytest.mark.parametrize(
    ("connected", "disabled", "reach"), [(True, "0", True), (True, "1", False), (False, "0", False)]
)
def test_cards_that_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, connected: bool, disabled: str, reach: bool
) -> None:
    """NCCL_P2P_DISABLE=1 says that they shall not, which nobody has to be warned of."""
    cards = SimpleNamespace(device_count=lambda: 2, can_device_access_peer=lambda one, other: connected)
    monkeypatch.setattr(torch, "cuda", cards)
    monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
    assert reach_each_other(range(2)) == reach
    assert ("do not reach each other's memory" in caplog.text) == (not connected)
