"""Experts as packed codes: the kernels against their twins, for 16-bit activations and for FP8; what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.experts.expert_codes import ExpertCodes
from vserve.kernels.experts.gating import GELU
from vserve.kernels.experts.moe import ExpertWeights, experts_torch
from vserve.kernels.experts.moe_codes import CodesTile, codes_tile, experts_codes, experts_codes_triton, tokens_of_codes
from vserve.kernels.experts.moe_fp8 import (
    Fp8ExpertTile,
    experts_fp8,
    experts_fp8_torch,
    experts_fp8_triton,
    experts_take_fp8,
    fp8_expert_tile,
)
from vserve.kernels.experts.moe_route import LITTLE_PAIRS
from vserve.kernels.experts.moe_triton import needs_sort
from vserve.kernels.linear.planes import pack, value_of

CUDA = torch.cuda.is_available()
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
TABLE = tuple(torch.linspace(-1, 1, 16).tanh().tolist())
ROWS = (1, 2, 16, 17, 64, 65, 128, 129, 256, 511, 1023, 1024, 4224)


def made(
    rng: torch.Generator, kind: str, num_experts: int, parts: int, n: int, k: int, group: int, shifts: bool = False,
    device: str = "cpu",
) -> ExpertCodes:  # fmt: skip
    """Random codes of finite numbers, of sums near 1; one expert in two has shifts, where they have."""
    table = TABLE if kind == "table" else ()
    finite = value_of(kind, table).isfinite().nonzero().flatten()
    size = float(value_of(kind, table)[finite].std()) * k**0.5
    groups, found = -(-k // group) if group else 1, None
    for expert in range(num_experts):
        for part in range(parts):
            codes = finite[torch.randint(0, len(finite), (n, k), generator=rng)].to(torch.uint8)
            scales = ((torch.rand(n, groups, generator=rng) + 0.5) / size).half()
            moved = torch.randn(n, groups, generator=rng).half() / k**0.5 if shifts and expert % 2 == 0 else None
            scales = scales.float() if kind == "e4m3" or (expert == 1 and shifts) else scales
            matrix = pack(codes.to(device), scales.to(device), kind, group, None if moved is None else moved.to(device),
                          table)  # fmt: skip
            if found is None:
                found = ExpertCodes.empty(num_experts, parts, matrix)
            assert found.holds(matrix)
            found = found.fitting(matrix)
            mine = found.of(expert, part)
            mine.words.copy_(matrix.words)
            mine.scales.copy_(matrix.scales)
            if matrix.shifts is not None and mine.shifts is not None:
                mine.shifts.copy_(matrix.shifts)
    assert found is not None
    return found


def routed(rng: torch.Generator, device: str, num_tokens: int, top_k: int, num_experts: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k).indices.int()
    return ids.to(device), torch.rand(num_tokens, top_k, generator=rng).to(device)


def numbers(gate_up: ExpertCodes, down: ExpertCodes, *biases: Tensor | None) -> ExpertWeights:
    both = [torch.stack([m.numbers(expert) for expert in range(len(m.words))]) for m in (gate_up, down)]
    return ExpertWeights(*both, *(None if bias is None else bias.float() for bias in biases))


def random(rng: torch.Generator, device: str, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=rng).to(device, dtype)


def assert_near(found: Tensor, wanted: Tensor, limit: float) -> None:
    assert found.isfinite().all()
    assert float((found.double() - wanted.double()).norm() / wanted.double().norm()) < limit


CASES = [
    # kind, group, shifts, T, k, E, H, I, block_m, block_n, fold
    ("int4", 128, False, 1, 2, 4, 256, 64, 16, 64, False),
    ("int4", 32, True, 5, 2, 3, 96, 70, 16, 64, False),
    ("int4", 32, True, 5, 2, 3, 160, 64, 16, 128, True),
    pytest.param("int4", 64, True, 40, 2, 3, 128, 40, 32, 128, False, marks=pytest.mark.slow),
    ("e2m1", 32, False, 1, 3, 4, 96, 96, 16, 64, True),
    pytest.param("e2m1", 32, False, 20, 3, 4, 160, 80, 16, 128, False, marks=pytest.mark.slow),
    ("table", 64, False, 3, 1, 2, 64, 32, 16, 64, False),
    ("int8", 0, False, 9, 2, 4, 140, 70, 16, 128, False),
    ("int8", 32, True, 3, 2, 2, 64, 64, 16, 64, True),
    ("e4m3", 0, False, 3, 2, 4, 130, 64, 16, 64, False),
    pytest.param("e4m3", 128, False, 33, 2, 3, 256, 128, 64, 128, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("kind", "group", "shifts", "tokens", "top_k", "experts", "hidden", "inner", "block_m", "block_n", "fold"), CASES
)
def test_products_with_codes(
    rng: torch.Generator, device: str, kind: str, group: int, shifts: bool, tokens: int, top_k: int, experts: int,
    hidden: int, inner: int, block_m: int, block_n: int, fold: bool,
) -> None:  # fmt: skip
    """Sorted or not; biases, the clamped activation, a shared expert's result, a residual stream to add to; tails
    of N and K."""
    gate_up = made(rng, kind, experts, 2, inner, hidden, group, shifts, device)
    down = made(rng, kind, experts, 1, hidden, inner, group, shifts, device)
    ids, weights = routed(rng, device, tokens, top_k, experts)
    x = random(rng, device, tokens, hidden + 8)[:, :hidden]
    biases = random(rng, device, experts, 2 * inner), random(rng, device, experts, hidden)
    tiles = CodesTile(block_m, block_n, 4, 2, fold), CodesTile(block_m, 64, 4, 2, fold, group=3)
    for sort, limit in ((True, 0.5), (False, 0.0), (True, GELU)):
        more = biases if limit else (None, None)
        beside = x if limit else None
        wanted = experts_torch(x.float(), ids, weights, numbers(gate_up, down, *more), limit, beside)
        stream = None if limit else x.clone()
        found = experts_codes_triton(
            x, ids, weights, gate_up, down, *more, limit=limit, beside=beside, tiles=tiles, sort=sort, residual=stream
        )
        assert stream is None or found is stream
        assert_near(found, wanted if limit else wanted + x, 2e-3)
        stream = x.clone() if limit else None
        found = experts_codes(x, ids, weights, gate_up, down, *more, limit=limit, beside=beside, residual=stream)
        assert stream is None or found is stream
        assert_near(found, wanted + x if limit else wanted, 2e-3 if CUDA else 1e-3)
        if CUDA:  # one by one
            found = experts_codes_triton(x, ids, weights, gate_up, down, *more, limit=limit, beside=beside, sort=False)
            assert_near(found, wanted, 2e-3)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "limit"), [(1, 256, 128, 0.0), (40, 136, 200, 0.5), (17, 128, 128, GELU)]
)
def test_fp8_by_fp8(
    rng: torch.Generator, device: str, group: int, tokens: int, hidden: int, inner: int, limit: float
) -> None:
    """The kernel is its twin, which is the product of numbers but for what 4 bits of mantissa lose."""
    gate_up = made(rng, "e4m3", 3, 2, inner, hidden, group, device=device)
    down = made(rng, "e4m3", 3, 1, hidden, inner, group, device=device)
    assert experts_take_fp8(gate_up, down)
    ids, weights = routed(rng, device, tokens, 2, 3)
    x = random(rng, device, tokens, hidden)
    biases = (random(rng, device, 3, 2 * inner), random(rng, device, 3, hidden)) if limit else (None, None)
    beside = x if limit else None
    tiles = Fp8ExpertTile(16, 256, 4, 2), Fp8ExpertTile(16, 128, 4, 2, group=3)
    stream = x.clone() if limit else None
    found = experts_fp8_triton(
        x, ids, weights, gate_up, down, *biases, limit=limit, beside=beside, tiles=tiles, residual=stream
    )
    assert stream is None or found is stream
    wanted = experts_fp8_torch(x.float(), ids, weights, gate_up, down, *biases, limit=limit, beside=beside)
    # The tensor cores add up some 14 bits; ties of the codes.
    assert_near(found, wanted + x if limit else wanted, 5e-3 if CUDA else 2e-3)
    plain = experts_torch(x.float(), ids, weights, numbers(gate_up, down, *biases), limit, beside)
    assert_near(wanted, plain, 0.09)
    if not CUDA:
        assert_near(experts_fp8(x, ids, weights, gate_up, down, *biases, limit=limit, beside=beside), wanted, 1e-3)
        added = experts_fp8(x, ids, weights, gate_up, down, *biases, limit=limit, beside=beside, residual=x.clone())
        assert_near(added, wanted + x, 1e-3)


def test_experts_that_nobody_has_are_not_read(rng: torch.Generator, device: str) -> None:
    """Another rank's ids have no weight, and no matrix."""
    gate_up, down = (made(rng, "e4m3", 2, parts, 128, 128, 0, device=device) for parts in (2, 1))
    ids = torch.tensor([[0, 2], [2, 1], [2, 2]], dtype=torch.int32, device=device)
    weights = torch.where(ids == 2, 0.0, 0.7)
    x = random(rng, device, 3, 128)
    wanted = experts_torch(x.float(), ids, weights, numbers(gate_up, down))
    for sort in (True, False):
        tiles = CodesTile(16, 64, 4, 2), CodesTile(16, 64, 4, 2)
        assert_near(experts_codes_triton(x, ids, weights, gate_up, down, tiles=tiles, sort=sort), wanted, 2e-3)
    assert_near(experts_codes(x, ids, weights, gate_up, down), wanted, 2e-3)
    tiles8 = Fp8ExpertTile(16, 256, 4, 2), Fp8ExpertTile(16, 128, 4, 2)
    assert_near(experts_fp8_triton(x, ids, weights, gate_up, down, tiles=tiles8), wanted, 0.09)


def test_a_row_that_is_not_finite_stays_alone(rng: torch.Generator, device: str) -> None:
    gate_up, down = (made(rng, "e4m3", 2, parts, 128, 128, 0, device=device) for parts in (2, 1))
    ids, weights = routed(rng, device, 5, 2, 2)
    x = random(rng, device, 5, 128)
    x[3, 7] = float("nan")
    tiles = Fp8ExpertTile(16, 256, 4, 2), Fp8ExpertTile(16, 128, 4, 2)
    for found in (
        experts_fp8_triton(x, ids, weights, gate_up, down, tiles=tiles),
        experts_codes_triton(x, ids, weights, gate_up, down, tiles=(CodesTile(16, 64), CodesTile(16, 64)), sort=True),
    ):
        assert found[3].isnan().all() and found[[0, 1, 2, 4]].isfinite().all()


def test_what_is_refused(rng: torch.Generator) -> None:
    gate_up, down = (made(rng, "int4", 1, parts, 64, 64, 32) for parts in (2, 1))
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(ValueError, match="64 columns as codes take contiguous rows of bf16 or fp16"):
        experts_codes_triton(torch.ones(2, 64), ids, weights, gate_up, down)
    with pytest.raises(ValueError, match="has 256 rows"):
        tile = Fp8ExpertTile(16, 128)
        experts_fp8_triton(torch.ones(2, 64).half(), ids, weights, gate_up, down, tiles=(tile, tile))


KINDS = [("int4", 128), ("int4", 32), ("e2m1", 32), ("table", 64), ("int8", 0), ("e4m3", 128)]


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize(("top_k", "experts"), [(8, 128), (2, 8), (4, 32), (8, 256), (1, 1)])
def test_the_warm_up_meets_every_variant(top_k: int, experts: int, kind: str, group: int) -> None:
    """Of tiles, sorted or not, with the pieces that they are sorted in, and with dependent launches or not. Both
    products have blocks of the same rows."""

    def variant(tokens: int) -> tuple[Any, ...]:
        rows, sort = tokens * top_k / experts, needs_sort(tokens, top_k, experts)
        little = sort and tokens * top_k <= LITTLE_PAIRS
        both = [fp8_expert_tile(product, rows) for product in ("gate_up", "down")]
        if kind == "e4m3" and both[0] is not None:
            assert both[1] is not None and both[0].block_m == both[1].block_m and sort
            return both[0], little
        tiles = [codes_tile(product, rows, 4 if kind not in ("int8", "e4m3") else 8, group)
                 for product in ("gate_up", "down")]  # fmt: skip
        assert tiles[0].block_m == tiles[1].block_m
        return tiles[0], sort, little, tokens <= 16

    met = {variant(tokens) for tokens in (*tokens_of_codes(top_k, experts, {kind}), 2, 4, 8, 16)}
    assert {variant(tokens) for tokens in range(1, 8193, 3)} <= met | {variant(8192)}


_COMPILE = """
from vserve.kernels.attention import kv_fp8
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
kv_fp8.packs = lambda device: True
from vserve.kernels.experts.expert_codes import ExpertCodes
from vserve.kernels.experts.moe_codes import experts_codes_triton
from vserve.kernels.experts.moe_fp8 import experts_fp8_triton
from vserve.kernels.linear.planes import Packed, pack

hidden, inner, num_experts, top_k, group = map(int, sys.argv[1:6])
kind, bias = sys.argv[6], "bias" in sys.argv

def codes(parts, n, k):
    scales = torch.ones(n, -(-k // group) if group else 1, dtype=torch.float32 if kind == "e4m3" else torch.float16)
    one = pack(torch.zeros(n, k, dtype=torch.uint8), scales, kind, group)
    one = one._replace(words=one.words.to("meta"), scales=one.scales.to("meta"))
    return ExpertCodes.empty(num_experts, parts, one)

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

matrices = codes(2, inner, hidden), codes(1, hidden, inner)
biases = (meta(num_experts, 2 * inner), meta(num_experts, hidden)) if bias else (None, None)
limit = 7.0 if bias else 0.0
for rows in map(int, sys.argv[7].split(",")):
    x, ids, weights = meta(rows, hidden), meta(rows, top_k, dtype=torch.int32), meta(rows, top_k, dtype=torch.float32)
    experts_codes_triton(x, ids, weights, *matrices, *biases, limit=limit)
    average = rows * top_k / num_experts
    if kind == "e4m3" and average > 24:
        experts_fp8_triton(x, ids, weights, *matrices, *biases, limit=limit, rows=average)
report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "kernel": name,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "touched_before": len(re.findall(r"(ld|st|atom)\\.global|\\bret;", before)) if waits else 0,
        "moved": kernel.asm["ttgir"].count("ttg.local_load"),
        "wgmma": "wgmma.mma_async" in body,
        "lookahead": max(map(int, re.findall(r"cp\\.async\\.wait_group\\s+(\\d+)", body)), default=0),
        **resources(kernel),
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    ("shape", "kind", "rows"),
    [
        ("2048 768 128 8 128", "int4", "1,64,256,512,2048"),  # Qwen3-30B-A3B
        pytest.param("2048 768 128 8 128", "e4m3", "1,64,256,512,2048", marks=pytest.mark.slow),
        pytest.param("2880 2880 32 4 32 bias", "e2m1", "1,16,150,300,2048", marks=pytest.mark.slow),  # gpt-oss-20b
        pytest.param("2048 768 128 8 0", "e4m3", "1,64,256,512,2048", marks=pytest.mark.slow),
        pytest.param("2048 768 128 8 0", "int8", "1,64,256,512,2048", marks=pytest.mark.slow),
        pytest.param("2048 768 128 8 32", "int4", "1,64,256,512,2048", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_compiles_for_hopper(shape: str, kind: str, rows: str, run_for_hopper: Callable[..., Any]) -> None:
    """With the tensor cores of Hopper, loads that run ahead, and no spilt register."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    sizes = shape.split()
    kernels = run_for_hopper(_COMPILE, *sizes[:5], kind, rows, *sizes[5:])
    names = {kernel["kernel"] for kernel in kernels}
    assert names >= {"_codes_kernel", "_sum_kernel", "_sort_kernel"}
    assert ("_fp8_expert_kernel" in names) == (kind == "e4m3")
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024
        assert kernel["stack"] == kernel["local"] == 0, f"{kernel} spills registers"
        assert kernel["touched_before"] == 0
        if kernel["kernel"] in ("_codes_kernel", "_fp8_expert_kernel"):
            assert kernel["wgmma"] and kernel["lookahead"] >= 1
        if kernel["kernel"] == "_codes_kernel":
            assert kernel["moved"] <= (1 if kind in ("int4", "e2m1") else 3), "codes that are shuffled on the way"
    assert len([kernel for kernel in kernels if kernel["kernel"] == "_codes_kernel"]) <= 2 * 6
