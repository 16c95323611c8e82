"""A router's logits together with the norm before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.experts import moe_router
from vserve.kernels.experts.moe_router import (
    MAX_HIDDEN,
    MIN_HIDDEN,
    experts_of_program,
    norm_router,
    norm_router_rows,
    norm_router_torch,
    norm_router_triton,
)
from vserve.kernels.norm.norm import Unnormed, rms_norm, rms_norm_triton

CUDA = torch.cuda.is_available()
HALF = torch.bfloat16 if CUDA else torch.float16


def operands(
    rng: torch.Generator, device: str, rows: int, experts: int, hidden: int, dtype: torch.dtype, kept: torch.dtype
) -> tuple[Unnormed, Tensor, Tensor]:
    x = (3 * torch.randn(rows, hidden + 8, generator=rng)).to(device, dtype)[:, :hidden]
    gain = torch.randn(hidden, generator=rng).to(device, kept)
    weight = (torch.randn(experts, hidden, generator=rng) / hidden**0.5).to(device, kept)
    return Unnormed(x, gain, 1e-5), weight, torch.randn(experts, generator=rng).to(device)


def wanted_logits(normed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = normed.double() @ weight.double().t()
    return logits if bias is None else logits + bias


@pytest.mark.parametrize("kept", [HALF, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("experts", "hidden"), [(8, 1024), (5, 720), (34, 600), (3, 2880)])
def test_the_norm_and_its_logits(
    rng: torch.Generator, device: str, rows: int, experts: int, hidden: int, kept: torch.dtype
) -> None:
    """Rows have the bits that a norm of its own makes; experts that the programs do not divide, tails of H."""
    x, weight, bias = operands(rng, device, rows, experts, hidden, HALF, kept)
    before = x.rows.clone()
    for added in (None, bias):
        normed, logits = norm_router_triton(x, weight, added)
        assert torch.equal(normed, rms_norm_triton(*x)) and normed.is_contiguous() and normed.dtype == HALF
        assert logits.dtype == torch.float32 and logits.shape == (rows, experts)
        torch.testing.assert_close(logits.double(), wanted_logits(normed, weight, added), atol=2e-5, rtol=1e-5)
        twin, twin_logits = norm_router_torch(x, weight, added)
        assert torch.equal(twin, rms_norm(*x))
        torch.testing.assert_close(twin_logits.double(), wanted_logits(twin, weight, added), atol=2e-5, rtol=1e-5)
    assert torch.equal(x.rows, before)


def test_a_row_is_the_same_in_every_company(rng: torch.Generator, device: str) -> None:
    """Whatever number of experts its programs have."""
    x, weight, bias = operands(rng, device, 16, 9, 1000, HALF, HALF)
    normed, logits = norm_router_triton(x, weight, bias)
    for rows in (1, 2, 4, 5):
        some, some_logits = norm_router_triton(x._replace(rows=x.rows[:rows]), weight, bias)
        assert torch.equal(some, normed[:rows]) and torch.equal(some_logits, logits[:rows])
    assert {experts_of_program(rows) for rows in (1, 4, 16)} == {experts_of_program(rows) for rows in range(1, 17)}


def test_not_a_number_stays_in_its_row(rng: torch.Generator, device: str) -> None:
    x, weight, bias = operands(rng, device, 3, 4, 600, HALF, HALF)
    x.rows[1, 5] = float("inf")
    normed, logits = norm_router_triton(x, weight, bias)
    assert normed[1].isnan().all() and logits[1].isnan().all()
    assert normed[[0, 2]].isfinite().all() and logits[[0, 2]].isfinite().all()


def test_no_rows_and_layouts_that_are_refused(rng: torch.Generator, device: str) -> None:
    x, weight, bias = operands(rng, device, 2, 4, 600, HALF, HALF)
    normed, logits = norm_router(x._replace(rows=x.rows[:0]), weight, bias)
    assert normed.shape == (0, 600) and logits.shape == (0, 4)
    for wrong in (weight.t().contiguous().t(), weight[:, :512]):
        with pytest.raises(ValueError, match=r"call contiguous\(\)"):
            norm_router_triton(x, wrong)


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, of rows that are summed as norms of their own sum them, and that fit registers; fewer of large
    weights, of which each row reads all."""

    def rows(hidden: int, dtype: torch.dtype = torch.bfloat16, experts: int = 8) -> int:
        return norm_router_rows(torch.empty(experts, hidden, dtype=dtype, device="meta"))

    assert rows(2048) == 0
    monkeypatch.setattr(moe_router, "pdl_available", lambda device: True)
    assert rows(2048) == rows(2048, torch.float32) == rows(MIN_HIDDEN) == rows(MAX_HIDDEN) == 16
    assert (
        rows(2048, experts=128) == 16 and rows(7168, torch.float32, 256) == 4 and rows(8192, torch.float32, 4096) == 1
    )
    assert rows(MIN_HIDDEN - 1) == rows(MAX_HIDDEN + 1) == rows(2048, torch.float64) == 0


_COMPILE = """
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
from vserve.kernels.experts.moe_router import norm_router_triton
from vserve.kernels.norm.norm import Unnormed, rms_norm_triton

experts, hidden = map(int, sys.argv[1:3])
kept = getattr(torch, sys.argv[3])
def empty(*shape, dtype=torch.bfloat16): return torch.empty(shape, dtype=dtype, device="meta")
for rows in (1, 3, 16):
    x = Unnormed(empty(rows, hidden), empty(hidden), 1e-6)
    norm_router_triton(x, empty(experts, hidden, dtype=kept), empty(experts, dtype=torch.float32))
    rms_norm_triton(*x)

def sums(kernel):
    # The layouts in which rows are added up.
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"(#\\w+) = (#ttg\\.\\S+<\\{.*?\\}>)", text))
    return [layouts[name] for name in re.findall(r"\\}\\) : \\(tensor<\\d+x\\d+xf32, (#\\w+)>\\) ->", text)]

report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "kernel": name,
        "waits": body.count("griddepcontrol"),
        "stores_before": len(re.findall(r"(st|atom)\\.global|\\bret;|\\bexit;", before)),
        "loads_before": "ld.global" in before,
        "warps": kernel.metadata.num_warps,
        "sums": sums(kernel),
        **resources(kernel),
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    ("experts", "hidden", "kept"),
    [
        (128, 2048, "bfloat16"),  # Qwen3-30B-A3B
        pytest.param(32, 2880, "bfloat16", marks=pytest.mark.slow),  # gpt-oss-20b
        pytest.param(256, 7168, "float32", marks=pytest.mark.slow),  # DeepSeek-V3
        pytest.param(32, 1024, "bfloat16", marks=pytest.mark.slow),  # Granite 3.0 1B
    ],
)
def test_compiles_for_hopper(experts: int, hidden: int, kept: str, run_for_hopper: Callable[..., Any]) -> None:
    """The weight is read before the wait, nothing is written there, no register spilt; and rows are added up over the
    threads as the norm's kernel does: that is what makes them the same bits."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    report = run_for_hopper(_COMPILE, str(experts), str(hidden), kept)
    mine = [kernel for kernel in report if kernel["kernel"] == "_norm_router_kernel"]
    (norm,) = (kernel for kernel in report if kernel["kernel"] == "_rms_norm_kernel")
    assert len(mine) == 3
    for kernel in mine:
        assert kernel["waits"] == 2 and kernel["loads_before"] and kernel["stores_before"] == 0
        assert kernel["stack"] == kernel["local"] == 0, f"{kernel} spills registers"
        assert kernel["warps"] == norm["warps"]
        assert kernel["sums"][0] == norm["sums"][0]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("experts", "hidden", "kept"),
    [
        (128, 2048, None),
        (32, 2880, None),
        (256, 7168, torch.float32),
        (8, 4096, None),
        (40, 1536, None),
        (32, 1024, None),
    ],
)
def test_real_shapes(
    rng: torch.Generator, device: str, experts: int, hidden: int, kept: torch.dtype | None, dtype: torch.dtype
) -> None:
    """The norm's own bits, launched behind it and in a graph that is replayed with other rows."""
    for rows in (1, 2, 4, 8, 16):
        x, weight, bias = operands(rng, device, rows, experts, hidden, dtype, kept or dtype)
        found = norm_router(x, weight, bias)
        assert torch.equal(found[0], rms_norm(*x))
        torch.testing.assert_close(found[1].double(), wanted_logits(found[0], weight, bias), atol=5e-5, rtol=1e-5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = norm_router(x, weight, bias)
        x.rows.copy_(torch.randn(x.rows.shape, generator=rng))
        graph.replay()
        for one, other in zip(replayed, norm_router(x, weight, bias), strict=True):
            assert torch.equal(one, other)
