"""Ranks that sum over memory they share, in processes, with the kernel interpreted: `python all_reduce_ranks.py SIZE`.

They are late in turn, before the kernel and within it, and rows come in changing numbers. Exits with 1 where a sum is
wrong, or differs from another rank's by a bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime import interpreter

from vserve.kernels.norm.all_reduce import ABSENT_32, Exchange, all_reduce, all_reduce_add_rms_norm
from vserve.kernels.norm.norm import add_rms_norm_torch

ROUNDS, MAX_ROWS, DIM, START = 30, 4, 24, 2**31 - 10  # counts wrap around on the way
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(turn: int, rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randn(num_rows, DIM, generator=generator).to(dtype)
    x[:, rank % 3] = -0.0  # which is not sent as it is
    if dtype == torch.float32:
        x.view(torch.int32)[:, 3] = ABSENT_32.value
    return x


def wait_sometimes(rank: int, turns: random.Random) -> None:
    if turns.random() < 0.2:
        time.sleep(0.004 * turns.random())


def run(rank: int, size: int, exchanges: dict[torch.dtype, Exchange], results: torch.Tensor) -> None:
    turns, late = random.Random(rank), random.Random(100 + rank)
    plan = random.Random(7)  # alike on all ranks
    builder = interpreter.interpreter_builder
    store, load = builder.create_masked_store, builder.create_masked_load

    def late_store(*arguments: Any) -> Any:
        wait_sometimes(rank, late)
        return store(*arguments)

    def yielding(*arguments: Any) -> Any:
        os.sched_yield()  # who waits takes nothing from whom it waits for
        return load(*arguments)

    builder.create_masked_store, builder.create_masked_load = late_store, yielding
    weight = torch.randn(DIM, generator=torch.Generator().manual_seed(1))
    for turn in range(ROUNDS):
        dtype, num_rows = plan.choice(DTYPES), plan.randint(1, MAX_ROWS)
        norm, scale = plan.random() < 0.7, plan.choice((1.0, 0.3))
        every = [inputs(turn, other, num_rows, dtype) for other in range(size)]
        total = sum(x.float() for x in every)
        wait_sometimes(rank, turns)
        if norm:
            residual = inputs(turn, 50, num_rows, dtype)
            expected, kept = add_rms_norm_torch(total, residual.clone(), weight, 1e-5, scale)
            found, residual = all_reduce_add_rms_norm(every[rank], residual, weight, 1e-5, scale, exchanges[dtype])
            torch.testing.assert_close(residual, kept)
        else:
            expected, found = total, all_reduce(every[rank], exchanges[dtype])
        limit = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(found.float(), expected.float(), atol=limit, rtol=limit, msg=f"round {turn}")
        results[turn, rank, : num_rows * DIM] = found.float().flatten()


def spare_the_interpreter() -> None:
    """As conftest.py does for the tests, when it is imported."""
    spec = importlib.util.spec_from_file_location("conftest", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def main() -> None:
    size = int(sys.argv[1])
    spare_the_interpreter()
    torch.set_num_threads(1)
    tables = {dtype: [] for dtype in DTYPES}
    kept = []  # what pointers point to
    for dtype in DTYPES:
        row_bytes = DIM * dtype.itemsize
        for _ in range(size):
            buffer = torch.zeros(Exchange.buffer_bytes(size, MAX_ROWS, row_bytes), dtype=torch.uint8).share_memory_()
            Exchange.empty(buffer)
            kept.append(buffer)
            tables[dtype].append(buffer.data_ptr())
    results = torch.zeros(ROUNDS, size, MAX_ROWS * DIM).share_memory_()
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            exchanges = {
                dtype: Exchange(
                    rank, torch.tensor(tables[dtype]), torch.full((MAX_ROWS,), START, dtype=torch.int32), MAX_ROWS,
                    DIM * dtype.itemsize,
                )
                for dtype in DTYPES
            }  # fmt: skip
            try:
                run(rank, size, exchanges, results)
            except BaseException as error:
                print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    for _ in children:
        if os.waitstatus_to_exitcode(os.wait()[1]):
            for child in children:  # which wait for it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            sys.exit(1)
    alike = all(torch.equal(results[:, 0], results[:, rank]) for rank in range(size))
    sys.exit(0 if alike and results.abs().sum() > 0 else 1)


if __name__ == "__main__":
    main()
