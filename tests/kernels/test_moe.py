"""The products of a mixture: the kernels against their twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.experts.gating import GELU, RELU2, gated
from vserve.kernels.experts.moe import ExpertWeights, experts, experts_torch, sum_of_experts
from vserve.kernels.experts.moe_route import LITTLE_PAIRS, Routing, route_torch, route_triton
from vserve.kernels.experts.moe_triton import (
    MoeTile,
    down_tile,
    experts_triton,
    gate_up_tile,
    needs_sort,
    sum_pairs,
    tokens_of_tiles,
)

CUDA = torch.cuda.is_available()
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
# T, k, E, H, I
SMALL = [(1, 2, 8, 32, 32), (2, 3, 5, 48, 40), (3, 1, 4, 64, 24), (17, 4, 12, 40, 72), (64, 2, 6, 32, 48)]


def operands(
    rng: torch.Generator, device: str, dtype: torch.dtype, num_experts: int, hidden: int, inner: int, bias: bool = False
) -> ExpertWeights:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=rng) / shape[-1] ** 0.5).to(device, dtype)

    biases = (random(num_experts, 2 * inner), random(num_experts, hidden)) if bias else (None, None)
    return ExpertWeights(random(num_experts, 2 * inner, hidden), random(num_experts, hidden, inner), *biases)


def routed(rng: torch.Generator, device: str, num_tokens: int, top_k: int, num_experts: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k).indices.int()
    return ids.to(device), torch.rand(num_tokens, top_k, generator=rng).to(device)


def expected(x: Tensor, ids: Tensor, weights: Tensor, matrices: ExpertWeights, *more: Any) -> Tensor:
    """In fp32 whatever the dtype."""
    plain = ExpertWeights(*(None if matrix is None else matrix.float() for matrix in matrices))
    return experts_torch(x.float(), ids, weights, plain, *more)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    limit = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[found.dtype]
    assert found.isfinite().all()
    torch.testing.assert_close(found.float(), wanted, atol=limit * float(wanted.abs().max()), rtol=limit)


def test_the_twin_of_each_activation(rng: torch.Generator) -> None:
    x = torch.randn(5, 16, generator=rng)
    gate, up = x.chunk(2, dim=1)
    assert torch.allclose(gated(x), torch.nn.functional.silu(gate) * up)
    assert torch.allclose(gated(x, GELU), torch.nn.functional.gelu(gate, approximate="tanh") * up)
    low, within = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    assert torch.allclose(gated(x, 0.5), low * torch.sigmoid(1.702 * low) * (within + 1))


def test_experts_without_gates(rng: torch.Generator, device: str) -> None:
    """Alone in their blocks, and sorted: down(max(up(x), 0)²)."""
    num_experts, hidden, inner = 5, 40, 24
    for num_tokens in (2, 17):
        both = operands(rng, device, torch.float32, num_experts, hidden, inner)
        matrices = ExpertWeights(both.gate_up[:, inner:].contiguous(), both.down)
        ids, weights = routed(rng, device, num_tokens, 3, num_experts)
        x = torch.randn(num_tokens, hidden, generator=rng).to(device)
        inner_values = torch.einsum("tkih,th->tki", matrices.gate_up[ids.long()], x).relu().square()
        wanted = torch.einsum("tkhi,tki,tk->th", matrices.down[ids.long()], inner_values, weights)
        assert_near(experts_torch(x, ids, weights, matrices, RELU2), wanted)
        assert_near(experts_triton(x, ids, weights, *matrices, limit=RELU2), wanted)


# In fp16 those that differ most: one token, and the largest.
TWINS = [(case, torch.float32) for case in SMALL] + [
    pytest.param(case, torch.float16, marks=[] if case in (SMALL[0], SMALL[-1]) else pytest.mark.slow) for case in SMALL
]


@pytest.mark.parametrize(("case", "dtype"), TWINS)
def test_kernels_equal_their_twin(rng: torch.Generator, device: str, case: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sorted or not; biases, the clamped activation, a shared expert's result, a residual stream to add to; tails
    of N and K; rows that pad."""
    num_tokens, top_k, num_experts, hidden, inner = case
    tiles = MoeTile(16, 16, 32, 4, 2), MoeTile(16, 32, 16, 4, 2, group=3)
    ids, weights = routed(rng, device, num_tokens, top_k, num_experts)
    x = torch.randn(num_tokens, hidden + 8, generator=rng).to(device, dtype)[:, :hidden]
    stream = torch.randn(num_tokens, hidden, generator=rng).to(device, dtype)
    for bias, limit, beside in ((False, 0.0, None), (True, 0.5, x), (False, GELU, None)):
        matrices = operands(rng, device, dtype, num_experts, hidden, inner, bias)
        wanted = expected(x, ids, weights, matrices, limit, beside)
        twin = stream.clone()
        assert experts(x, ids, weights, matrices, limit, beside, residual=twin) is twin
        assert_near(twin, wanted + stream.float())
        for sort in (True, False) if num_tokens < 17 else (True,):
            found = experts_triton(x, ids, weights, *matrices, limit=limit, beside=beside, tiles=tiles, sort=sort)
            assert found.is_contiguous()
            assert_near(found, wanted)
        residual = stream.clone()
        more = {"limit": limit, "beside": beside, "tiles": tiles, "sort": num_tokens >= 17, "residual": residual}
        assert experts_triton(x, ids, weights, *matrices, **more) is residual
        assert_near(residual, wanted + stream.float())


@pytest.mark.parametrize("hidden", [40, 1100])
@pytest.mark.parametrize("beside", [False, True])
def test_the_sum_is_rounded_once(rng: torch.Generator, device: str, hidden: int, beside: bool) -> None:
    """Also where the stream is added to in its place, among other columns, which stay; so does the twin's."""
    results = torch.randn(5 * 3, hidden, generator=rng).to(device, torch.float16)
    weights = torch.rand(5, 3, generator=rng).to(device)
    stream = (8 * torch.randn(5, hidden + 8, generator=rng)).to(device, torch.float16)
    other = torch.randn(5, hidden, generator=rng).to(device, torch.float16) if beside else None
    plain = (weights[:, :, None] * results.view(5, 3, hidden).double()).sum(1) + (
        0 if other is None else other.double()
    )
    exact = stream[:, :hidden].double() + plain
    found, within = stream.clone(), 0.501 * torch.finfo(torch.float16).eps
    sum_pairs(results, weights, other, found[:, :hidden])
    torch.testing.assert_close(found[:, :hidden].double(), exact, rtol=within, atol=1e-5)
    assert torch.equal(found[:, hidden:], stream[:, hidden:])
    torch.testing.assert_close(sum_pairs(results, weights, other).double(), plain, rtol=within, atol=1e-5)

    def mlp(expert: int, rows: Tensor, tokens: Tensor | slice) -> Tensor:
        return results.view(5, 3, hidden)[tokens, expert]

    ids, found = torch.arange(3, dtype=torch.int32, device=device).expand(5, 3), stream.clone()
    sum_of_experts(stream[:, :hidden], ids, weights, mlp, other, found[:, :hidden])
    torch.testing.assert_close(found[:, :hidden].double(), exact, rtol=within, atol=1e-5)
    assert torch.equal(found[:, hidden:], stream[:, hidden:])


@pytest.mark.parametrize("num_tokens", [1, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_ranks_that_have_some_of_the_experts(rng: torch.Generator, device: str, num_tokens: int) -> None:
    """Their sum is what all do, sorted or not; what others have is not read, for it is not there."""
    matrices, how = operands(rng, device, torch.float32, 6, 32, 16, bias=True), Routing(3, renormalize=True)
    x, logits = torch.randn(num_tokens, 32, generator=rng).to(device), torch.randn(num_tokens, 6, generator=rng)
    logits[-1, :4] = -9.0  # no expert of the first rank
    logits = logits.to(device)
    wanted = expected(x, *route_torch(logits, how), matrices)
    for sort in (True, False, None):
        total = torch.zeros_like(x)
        for first in (0, 2, 4):
            mine = ExpertWeights(*(None if m is None else m[first : first + 2].contiguous() for m in matrices))
            ids, weights = route_triton(logits, how, mine=range(first, first + 2))
            ids_twin, weights_twin = route_torch(logits, how, mine=range(first, first + 2))
            assert torch.equal(ids, ids_twin) and int(ids.max()) <= 2
            torch.testing.assert_close(weights, weights_twin)
            part = expected(x, ids, weights, mine)
            if sort is not None:
                tiles = MoeTile(16, 16, 32, 4, 2), MoeTile(16, 32, 16, 4, 2)
                found = experts_triton(x, ids, weights, *mine, tiles=tiles, sort=sort)
                assert_near(found, part)
            total += part
        assert_near(total, wanted)


@pytest.mark.parametrize("num_tokens", [16, 17, 32, 33, 144, 145, 300])
def test_all_tokens_to_the_same_experts(rng: torch.Generator, device: str, num_tokens: int) -> None:
    """Others get nothing, and their weights, which are not numbers, are not touched."""
    matrices = operands(rng, device, torch.float32, 7, 32, 16)
    for matrix in (matrices.gate_up, matrices.down):
        matrix[[0, 1, 3, 4, 6]] = float("nan")
    x, weights = torch.randn(num_tokens, 32, generator=rng), torch.rand(num_tokens, 2, generator=rng)
    x, weights = x.to(device), weights.to(device)
    ids = torch.tensor([[5, 2]], dtype=torch.int32, device=device).expand(num_tokens, 2).contiguous()
    tiles = MoeTile(64, 16, 32, 4, 2, short=16), MoeTile(64, 32, 16, 4, 2, short=32)
    found = experts_triton(x, ids, weights, *matrices, tiles=tiles)
    assert_near(found, expected(x, ids, weights, matrices))
    assert torch.equal(experts_triton(x, ids, weights, *matrices, tiles=tiles), found)


def test_a_row_that_is_not_finite_stays_alone(rng: torch.Generator, device: str) -> None:
    matrices = operands(rng, device, torch.float32, 4, 32, 16)
    x = torch.randn(9, 32, generator=rng).to(device)
    ids, weights = routed(rng, device, 9, 2, 4)
    x[4] = float("inf")
    found = experts_triton(x, ids, weights, *matrices)
    others = [row for row in range(9) if row != 4]
    assert not found[4].isfinite().all()
    assert_near(found[others], expected(x[others], ids[others], weights[others], matrices))


def test_no_tokens(rng: torch.Generator, device: str) -> None:
    matrices = operands(rng, device, torch.float32, 4, 32, 16)
    none = torch.empty(0, 2, device=device)
    x = torch.empty(0, 32, device=device)
    assert experts_triton(x, none.int(), none, *matrices).shape == (0, 32)
    assert experts_triton(x, none.int(), none, *matrices, residual=x) is x


@pytest.mark.parametrize(("top_k", "num_experts"), [(8, 128), (2, 8), (4, 32), (4, 128), (8, 256), (1, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_both_products_have_blocks_of_the_same_rows(top_k: int, num_experts: int, itemsize: int) -> None:
    for num_tokens in range(1, 8200, 7):
        first, second = (tile(num_tokens, top_k, num_experts, itemsize) for tile in (gate_up_tile, down_tile))
        assert first.block_m == second.block_m
    assert needs_sort(num_tokens, top_k, num_experts)


@pytest.mark.parametrize(("top_k", "num_experts"), [(8, 128), (2, 8), (4, 32), (4, 128), (8, 256), (1, 1), (10, 512)])
def test_the_warm_up_meets_every_variant(top_k: int, num_experts: int) -> None:
    """Of tiles, sorted or not, with the pieces that they are sorted in, and with dependent launches or not."""

    def variant(num_tokens: int) -> tuple[Any, ...]:
        shape = num_tokens, top_k, num_experts
        sort = needs_sort(*shape)
        return gate_up_tile(*shape, 2), sort, sort and num_tokens * top_k <= LITTLE_PAIRS, num_tokens <= 16

    met = {variant(num_tokens) for num_tokens in (*tokens_of_tiles(top_k, num_experts), 2, 4, 8, 16)}
    assert {variant(num_tokens) for num_tokens in range(1, 8193)} <= met | {variant(8192)}


def test_layouts_that_are_refused() -> None:
    x, ids, weights = torch.ones(2, 16), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"call contiguous\(\)"):
        experts_triton(x, ids, weights, torch.ones(1, 16, 16).transpose(1, 2), torch.ones(1, 16, 8))
    with pytest.raises(ValueError, match="rows that are contiguous"):
        sum_pairs(x, weights, None, torch.ones(16, 2).t())


_COMPILE = """
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: sys.argv[1] == "pdl"
pdl.MAX_ROWS = 64
from vserve.kernels.experts.moe_route import Routing, route_triton
from vserve.kernels.experts.moe_triton import experts_triton

hidden, inner, num_experts, top_k = map(int, sys.argv[2:6])

gate_up = torch.empty(num_experts, 2 * inner, hidden, dtype=torch.bfloat16, device="meta")
down = torch.empty(num_experts, hidden, inner, dtype=torch.bfloat16, device="meta")
bias = torch.empty(num_experts, 2 * inner, dtype=torch.bfloat16, device="meta") if "bias" in sys.argv else None
down_bias = torch.empty(num_experts, hidden, dtype=torch.bfloat16, device="meta") if "bias" in sys.argv else None
limit = 7.0 if "bias" in sys.argv else 0.0
for rows in map(int, sys.argv[6].split(",")):
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(rows, top_k, dtype=torch.int32, device="meta")
    weights = torch.empty(rows, top_k, device="meta")
    logits, load = (torch.empty(size, dtype=kind, device="meta") for size, kind in
                    (((rows, num_experts), torch.float32), (num_experts, torch.int64)))
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    route_triton(logits, Routing(top_k, renormalize=True), load=load, query_start=ends)
    for residual in (torch.empty_like(x), None):  # None: of several ranks
        experts_triton(x, ids, weights, gate_up, down, bias, down_bias, limit=limit, beside=None if bias is None else x,
                       residual=residual)
report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "kernel": name,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "griddepcontrol": body.count("griddepcontrol"),
        "touched_before": len(re.findall(r"(ld|st|atom)\\.global|\\bret;|\\bexit;", before)) if waits else 0,
        "wgmma": "wgmma.mma_async" in body,
        "lookahead": max(map(int, re.findall(r"cp\\.async\\.wait_group\\s+(\\d+)", body)), default=0),
        **resources(kernel),
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ("2048 768 128 8", "1,64,256,512,2048"),  # Qwen3-30B-A3B
        pytest.param("2880 2880 32 4 bias", "1,16,200,300,2048", marks=pytest.mark.slow),  # gpt-oss-20b
        pytest.param("4096 14336 8 2", "1,16,64,128,2048", marks=pytest.mark.slow),  # Mixtral 8x7B
    ],
)
@pytest.mark.slow
def test_compiles_for_hopper(shape: str, rows: str, run_for_hopper: Callable[..., Any]) -> None:
    """With the tensor cores of Hopper, loads that run ahead, and no spilt register; few rows as dependent launches."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    sizes = shape.split()
    kernels = run_for_hopper(_COMPILE, "pdl", *sizes[:4], rows, *sizes[4:])
    assert {kernel["kernel"] for kernel in kernels} == {
        "_route_kernel", "_count_kernel", "_sort_kernel", "_expert_kernel", "_sum_kernel"
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024
        assert kernel["stack"] == kernel["local"] == 0, f"{kernel} spills registers"
        assert kernel["griddepcontrol"] in (0, 2) and kernel["touched_before"] == 0
        if kernel["kernel"] == "_expert_kernel":
            assert kernel["wgmma"] and kernel["lookahead"] >= 2
    assert len([kernel for kernel in kernels if kernel["kernel"] == "_expert_kernel"]) <= 2 * 6


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "top_k", "bias"),
    [(2048, 768, 128, 8, False), (2880, 2880, 32, 4, True), (1024, 3584, 8, 2, False), (2048, 1408, 60, 4, False)],
)
def test_real_shapes(
    rng: torch.Generator, device: str, hidden: int, inner: int, num_experts: int, top_k: int, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Every tile, twice the same, and in a graph that is replayed with another routing."""
    matrices = operands(rng, device, dtype, num_experts, hidden, inner, bias)
    limit = 7.0 if bias else 0.0
    for num_tokens in (1, 2, 3, 17, 64, 300, 1000, 3000):
        x = torch.randn(num_tokens, hidden, generator=rng).to(device, dtype)
        ids, weights = routed(rng, device, num_tokens, top_k, num_experts)
        found = experts_triton(x, ids, weights, *matrices, limit=limit, beside=x)
        assert_near(found, expected(x, ids, weights, matrices, limit, x))
        assert torch.equal(experts_triton(x, ids, weights, *matrices, limit=limit, beside=x), found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = experts_triton(x, ids, weights, *matrices, limit=limit, beside=x)
            stream = x.clone()
            experts_triton(x, ids, weights, *matrices, limit=limit, beside=x, residual=stream)
        for other in (ids[:1].expand_as(ids).contiguous(), routed(rng, device, num_tokens, top_k, num_experts)[0]):
            ids.copy_(other)
            graph.replay()
            assert torch.equal(replayed, experts_triton(x, ids, weights, *matrices, limit=limit, beside=x))
            assert_near(stream, expected(x, ids, weights, matrices, limit, 2 * x.float()))
