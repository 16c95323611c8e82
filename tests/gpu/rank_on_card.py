"""Ranks on the cards of one host, for test_ranks_gpu.py: `python rank_on_card.py NUM MODE`; rank 0 prints its findings.

sums: of the kernel against NCCL's, for every size. late: the same with ranks that are late in turn, by up to 5 ms,
launched and replayed. times: µs of both, in CUDA graphs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, multiprocessing

from vserve.engine.parallel.group import ProcessGroup
from vserve.engine.parallel.join import join
from vserve.engine.parallel.symmetric import SymmetricGroup
from vserve.kernels.norm.norm import add_rms_norm

EPS = 1e-5


def inputs(turn: int, rank: int, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * turn + rank)
    return torch.randn(rows, hidden, generator=generator, device="cuda").to(dtype)


def alike(group: ProcessGroup, x: Tensor) -> bool:
    """The same bits on every rank."""
    every = group.all_gather(x.contiguous().view(torch.uint8)[None], dim=0)
    return bool((every == every[0]).all())


def check(group: SymmetricGroup, turn: int, rows: int, hidden: int, dtype: torch.dtype, norm: bool) -> None:
    every = [inputs(turn, rank, rows, hidden, dtype) for rank in range(group.size)]
    residual = inputs(turn, 99, rows, hidden, dtype)
    weight = inputs(0, 98, 1, hidden, torch.bfloat16)[0]
    total = sum(x.float() for x in every)
    assert isinstance(total, Tensor)
    limit = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    x = every[group.rank]
    nccl = ProcessGroup.all_reduce(group, x.clone())
    torch.testing.assert_close(nccl.float(), total, atol=limit, rtol=limit)
    if norm:
        wanted, kept = add_rms_norm(total, residual.float().clone(), weight, EPS)
        found, residual = group.add_rms_norm(x, residual, weight, EPS)
        torch.testing.assert_close(residual.float(), kept, atol=limit, rtol=limit)
        assert alike(group, residual)
    else:
        wanted, found = total, group.all_reduce(x)
    torch.testing.assert_close(found.float(), wanted, atol=limit, rtol=limit)
    assert alike(group, found)


def prepared(group: SymmetricGroup, row_bytes: int) -> SymmetricGroup:
    """For rows of so many bytes, whatever it was for before."""
    group.exchange = None
    group.prepare(row_bytes)
    assert group.exchange is not None
    return group


def sums(group: SymmetricGroup) -> None:
    turn = 0
    for hidden, dtype in ((4096, torch.bfloat16), (8192, torch.float16), (2880, torch.bfloat16), (4096, torch.float32)):
        prepared(group, hidden * dtype.itemsize)
        assert group.exchange is not None
        most = group.exchange.max_rows
        for rows in sorted({1, 2, 3, 16, 17, 64, 257, most - 1, most, most + 1, 2048}):
            for norm in (False, True):
                turn += 1
                check(group, turn, rows, hidden, dtype, norm)
    print(f"rank {group.rank}: {turn} sums are NCCL's", flush=True)


def late(group: SymmetricGroup) -> None:
    hidden, dtype = 4096, torch.bfloat16
    prepared(group, hidden * dtype.itemsize)
    own, plan = random.Random(group.rank), random.Random(7)
    for turn in range(400):
        if own.random() < 0.3:
            torch.cuda._sleep(int(own.random() * 1e7))  # cycles: up to 5 ms
        check(group, turn, plan.randint(1, 64), hidden, dtype, plan.random() < 0.5)
    # A graph of sums of several sizes, each of the one before: as layers are.
    shapes = [1, 64, 64, 7, 512, 1]
    start = [inputs(index, group.rank, rows, hidden, dtype) / 100 for index, rows in enumerate(shapes)]
    weight = torch.ones(hidden, dtype=dtype, device="cuda")
    held = [x.clone() for x in start]
    outs: list[Tensor] = []

    def step() -> list[Tensor]:
        found = []
        for x in held:
            y, residual = group.add_rms_norm(x.clone(), x.clone(), weight, EPS)
            found += [group.all_reduce(y.clone()), residual]
            found.append(ProcessGroup.all_reduce(group, residual.clone()))
        return found

    wanted = [out.clone() for out in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    replays, wrong = 100_000, torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(replays):
        if own.random() < 0.01:
            torch.cuda._sleep(int(own.random() * 1e7))
        graph.replay()
        if replay % 50 == 0:
            for out, right in zip(outs, wanted, strict=True):
                wrong += (out != right).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} elements of replays differ"
    print(f"rank {group.rank}: {replays} replays of {len(shapes) * 3} sums are alike", flush=True)


def micros(step: Callable[[], object], count: int = 100) -> float:
    """Of one call, in a graph of many."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            step()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / (5 * count) * 1e3


def through_nccl(group: SymmetricGroup, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(ProcessGroup.all_reduce(group, x), residual, weight, EPS)


def times(group: SymmetricGroup) -> None:
    for hidden in (4096, 8192):
        prepared(group, hidden * 2)
        assert group.exchange is not None
        weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        for rows in (1, 4, 16, 64, 256, 512, 1024, 4224):
            x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
            residual = torch.zeros_like(x)
            found = {
                "rows": rows, "hidden": hidden,
                "nccl": micros(partial(through_nccl, group, x, residual, weight)),
                "fused": micros(partial(group.add_rms_norm, x, residual, weight, EPS)),
                "norm alone": micros(partial(add_rms_norm, x, residual, weight, EPS)),
            }  # fmt: skip
            if group.rank == 0:
                print(json.dumps(found), flush=True)


def run(rank: int, size: int, meeting: str, mode: str) -> None:
    torch.cuda.set_device(rank)
    group = join(rank, size, meeting, torch.device("cuda", rank), symmetric=True)
    assert isinstance(group, SymmetricGroup), "the cards do not reach each other's memory"
    {"sums": sums, "late": late, "times": times}[mode](group)
    torch.cuda.synchronize()
    group.close()


if __name__ == "__main__":
    size, mode = int(sys.argv[1]), sys.argv[2]
    meeting = f"file://{Path(tempfile.mkdtemp()) / 'store'}"
    multiprocessing.spawn(run, (size, meeting, mode), nprocs=size)
