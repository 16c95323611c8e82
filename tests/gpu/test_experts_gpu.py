"""Quantised experts on a GPU: each layout against the numbers its codes mean, at rows where other tiles, the sort and
FP8 activations take over, with ragged rows and columns; the same again and in CUDA graphs; counts of tokens there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vserve.engine.quant.codes import Codes
from vserve.engine.quant.experts import PackedExperts
from vserve.engine.quant.weights import Placement
from vserve.kernels.experts.moe import ExpertWeights, experts_torch
from vserve.kernels.experts.moe_fp8 import experts_fp8_torch, experts_fp8_triton, fp8_expert_tile
from vserve.kernels.experts.moe_route import Routing, route_torch, route_triton
from vserve.kernels.linear.planes import value_of

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")]
DEVICE = torch.device("cuda", 0)
ROWS = (1, 2, 16, 17, 64, 65, 128, 129, 256, 511, 1023, 1024, 4224)
# bits, dtype of the codes, group (0: a row), what else
LAYOUTS = {
    "int4 G=128": (4, torch.int8, 128, ""),
    "int4 G=64 zeros": (4, torch.uint8, 64, "zeros"),
    "int4 G=32": (4, torch.int8, 32, ""),
    "mxfp4 G=32": (4, torch.uint8, 32, "e2m1"),
    "nvfp4 G=16": (4, torch.uint8, 16, "e2m1"),
    "nf4 G=64": (4, torch.uint8, 64, "table"),
    "int8 rows": (8, torch.int8, 0, ""),
    "int8 G=128 zeros": (8, torch.uint8, 128, "zeros"),
    "fp8 rows": (8, torch.float8_e4m3fn, 0, ""),
    "fp8 blocks": (8, torch.float8_e4m3fn, 128, ""),
}
# hidden, inner, experts, of which a token has so many; the last is gpt-oss-20b's
QWEN, RAGGED, GPT_OSS = (2048, 768, 128, 8), (1040, 200, 7, 3), (2880, 2880, 32, 4)
CASES = [
    *((layout, RAGGED) for layout in LAYOUTS),
    *((layout, QWEN) for layout in ("int4 G=128", "int8 rows", "fp8 blocks", "fp8 rows")),
    ("mxfp4 G=32", GPT_OSS),
]


def make(layout: str, rows: int, columns: int, generator: torch.Generator) -> Codes:
    bits, dtype, group, more = LAYOUTS[layout]
    groups = -(-columns // group) if group else 1
    table = {"table": torch.linspace(-1, 1, 16).tanh(), "e2m1": value_of("e2m1")}.get(more)
    if dtype.is_floating_point:
        codes = torch.randn(rows, columns, generator=generator, device=DEVICE).mul_(32).clamp_(-448, 448).to(dtype)
    else:
        low = 0 if dtype == torch.uint8 else -(1 << (bits - 1))
        size = (rows, columns)
        codes = torch.randint(low, low + (1 << bits), size, generator=generator, device=DEVICE, dtype=torch.int32)
        codes = codes.to(dtype)
    spread = 32.0 if dtype.is_floating_point else float(table.std()) if table is not None else 0.29 * (1 << bits)
    scales = (0.5 + torch.rand(rows, groups, generator=generator, device=DEVICE)) / (spread * columns**0.5)
    if more == "e2m1" and group == 32:
        scales = scales.log2().round().exp2()
    zeros = None
    if more == "zeros":
        zeros = (1 << (bits - 1)) + torch.randint(-2, 3, (rows, groups), generator=generator, device=DEVICE).float()
    return Codes(codes, scales, group or columns, bits, zeros, None, None if table is None else table.to(DEVICE))


def experts(
    layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, bias: bool
) -> tuple[PackedExperts, ExpertWeights]:
    """The method that serves, and what its codes mean."""
    hidden, inner, count, _ = shape
    generator = torch.Generator(DEVICE).manual_seed(len(layout))

    def never() -> None:
        raise AssertionError("these codes have kernels")

    method = PackedExperts(count, count, Placement(dtype, DEVICE), 7.0 if bias else 0.0, never)  # type: ignore[arg-type]
    gate_up = torch.empty(count, 2 * inner, hidden, device=DEVICE)
    down = torch.empty(count, hidden, inner, device=DEVICE)
    for expert in range(count):
        parts = {"gate": gate_up[expert, :inner], "up": gate_up[expert, inner:], "down": down[expert]}
        for part, numbers in parts.items():
            codes = make(layout, *numbers.shape, generator)
            method.take(expert, part, codes)
            numbers.copy_(codes.dequantize())
    method.finish()
    biases = [
        torch.randn(count, n, generator=generator, device=DEVICE) / 4 if bias else None for n in (2 * inner, hidden)
    ]
    return method, ExpertWeights(gate_up, down, *biases)


def routed(tokens: int, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    ids = torch.rand(tokens, shape[2], device=DEVICE).topk(shape[3]).indices.int()
    return ids, torch.rand(tokens, shape[3], device=DEVICE)


@pytest.mark.parametrize(("layout", "shape"), CASES)
def test_products_at_every_border(layout: str, shape: tuple[int, int, int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float16) if shape == RAGGED else (torch.bfloat16,):
        bias = shape != QWEN
        method, plain = experts(layout, shape, dtype, bias)
        biases = tuple(None if b is None else b.to(dtype) for b in plain[2:])
        plain = ExpertWeights(*plain[:2], *(None if b is None else b.float() for b in biases))
        for tokens in ROWS:
            x = torch.randn(tokens, shape[0], device=DEVICE).to(dtype)
            ids, weights = routed(tokens, shape)
            found = method.mix(x, ids, weights, biases, x)
            wanted = experts_torch(x.float(), ids, weights, plain, method.limit, x.float())
            eight = method.fp8 and fp8_expert_tile("gate_up", tokens * shape[3] / shape[2]) is not None
            assert off(found, wanted) < (0.06 if eight else 0.006), tokens
            assert torch.equal(method.mix(x, ids, weights, biases, x), found), "not the same again"
            # All tokens to the same experts, and to none of the others.
            ids = ids[:1].expand_as(ids).contiguous()
            found = method.mix(x, ids, weights, biases, None)
            wanted = experts_torch(x.float(), ids, weights, plain, method.limit)
            assert off(found, wanted) < (0.08 if eight else 0.006), tokens


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("layout", ["int4 G=128", "fp8 blocks"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 1024])
def test_a_graph_is_replayed_with_other_routings(layout: str, tokens: int) -> None:
    """Router, counts, experts, twice in a row, launched while others run: the same bits as one by one."""
    method, _ = experts(layout, QWEN, torch.bfloat16, False)
    how = Routing(QWEN[3], renormalize=True)
    x = torch.empty(tokens, QWEN[0], device=DEVICE, dtype=torch.bfloat16)
    gate = torch.randn(QWEN[2], QWEN[0], device=DEVICE, dtype=torch.bfloat16) / 45
    ends, load = (
        torch.zeros(4, dtype=torch.int32, device=DEVICE),
        torch.zeros(QWEN[2], dtype=torch.int64, device=DEVICE),
    )

    def run(wait: bool) -> Tensor:
        y = x
        for _ in range(2):
            logits = torch.mm(y, gate.t(), out_dtype=torch.float32)
            if wait:
                torch.cuda.synchronize()
            ids, weights = route_triton(logits, how, load=load, query_start=ends)
            if wait:
                torch.cuda.synchronize()
            y = method.mix(y, ids, weights, (None, None), y)
            if wait:
                torch.cuda.synchronize()
        return y

    x.normal_()
    run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(wait=False)
    for real in (tokens, tokens // 2, 0):
        x.normal_()
        ends.fill_(real)
        load.zero_()
        expected, counted = run(wait=True), load.clone()
        assert int(counted.sum()) == 2 * real * QWEN[3]
        for _ in range(5):
            load.zero_()
            result.fill_(float("nan"))
            graph.replay()
            assert torch.equal(result, expected) and torch.equal(load, counted)


@pytest.mark.parametrize("layout", ["fp8 rows", "fp8 blocks"])
def test_fp8_by_fp8_is_its_twin(layout: str) -> None:
    for shape in (RAGGED, (1024, 768, 16, 4)):
        method, _ = experts(layout, shape, torch.bfloat16, False)
        for tokens in (3, 130, 700):
            x = torch.randn(tokens, shape[0], device=DEVICE, dtype=torch.bfloat16)
            ids, weights = routed(tokens, shape)
            found = experts_fp8_triton(x, ids, weights, method.gate_up_codes, method.down_codes, rows=100.0)
            wanted = experts_fp8_torch(x, ids, weights, method.gate_up_codes, method.down_codes)
            assert off(found, wanted) < 8e-3


def test_counts_leave_padding_out() -> None:
    logits = torch.randn(4096, 128, device=DEVICE)
    for how in (Routing(8), Routing(4, "sigmoid", 4, 2, "top2")):
        for real in (0, 1, 1000, 4096):
            ends = torch.tensor([0, real // 2, real], dtype=torch.int32, device=DEVICE)
            found, wanted = (torch.zeros(128, dtype=torch.int64, device=DEVICE) for _ in range(2))
            route_triton(logits, how, load=found, query_start=ends)
            route_torch(logits, how, load=wanted, query_start=ends)
            assert torch.equal(found, wanted) and int(found.sum()) == real * how.top_k
