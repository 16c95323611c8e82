"""Sums over ranks: processes that share memory, with the kernel interpreted; and what it becomes on Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.norm.all_reduce import Exchange

CUDA = torch.cuda.is_available()


@pytest.mark.slow
def test_ranks_that_are_late_in_turn() -> None:
    """Before and within the kernel: every sum is right, and the same on all."""
    script = Path(__file__).with_name("all_reduce_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), "3"], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_exchanged() -> None:
    exchange = Exchange(0, torch.zeros(2, dtype=torch.int64), torch.zeros(8, dtype=torch.int32), 8, 64 * 2)
    rows = torch.zeros(8, 128, dtype=torch.bfloat16)
    assert exchange.takes(rows[:, :64]) and exchange.takes(rows[:1, 64:])
    for other in (rows, rows[:, :64].float(), rows[:0, :64], rows[:, ::2], rows[0, :64], torch.zeros(9, 64).half()):
        assert not exchange.takes(other)
    assert Exchange.buffer_bytes(2, 8, 128) == 2 * 8 * 128 and Exchange.buffer_bytes(4, 8, 128) == 3 * 2 * 8 * 128


_COMPILE = """
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
from vserve.kernels.norm.all_reduce import Exchange, all_reduce, all_reduce_add_rms_norm

for size, hidden in ((2, 2880), (8, 8192)):
    exchange = Exchange(
        size - 1, torch.empty(size, dtype=torch.int64, device="meta"),
        torch.empty(512, dtype=torch.int32, device="meta"), 512, 2 * hidden,
    )
    weight = torch.empty(hidden, dtype=torch.bfloat16, device="meta")
    x = torch.empty(1, hidden, dtype=torch.bfloat16, device="meta")
    all_reduce(x, exchange)
    all_reduce_add_rms_norm(x, torch.empty_like(x), weight, 1e-5, 1.0, exchange)
report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "loads": re.findall(r"ld\\.\\S*global\\S*", body), "stores": re.findall(r"st\\.\\S*global\\S*", body),
        "ordered": re.findall(r"(?:atom|fence|membar)\\S*", body), **resources(kernel),
        "touched_before": len(re.findall(r"(st|atom|red)\\.", before)) if waits else 0,
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="tests/gpu runs it on cards")
@pytest.mark.slow
def test_compiles_for_hopper(run_for_hopper: Callable[..., Any]) -> None:
    """Rows go in pieces of 16 bytes, past every cache, and nothing waits for them to arrive but their readers."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    kernels = run_for_hopper(_COMPILE)
    assert len(kernels) == 2 * 2
    sent = []
    for kernel in kernels:
        assert kernel["stack"] == kernel["local"] == 0, "spilt registers"
        assert kernel["touched_before"] == 0 and kernel["ordered"] == []
        read = {name for name in kernel["loads"] if "volatile" in name}
        assert read and all("v4" in name for name in read)
        through = [name for name in kernel["stores"] if ".wt" in name]
        assert all("v4" in name for name in through)
        sent.append(len(through))
    assert sent[0] == sent[1] and sent[2] == sent[3] and sent[2] % 7 == 0 and sent[0] > 0
