"""Quantised matrices on a GPU: each layout against the numbers its codes mean, at rows where another kernel takes over,
with ragged rows and columns; in CUDA graphs; chained as a layer has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vserve.engine.layers.linear import Linear
from vserve.engine.quant import matrix as packed_module
from vserve.engine.quant.codes import Codes
from vserve.engine.quant.matrix import PackedMatrix
from vserve.engine.quant.online import Online
from vserve.engine.quant.weights import Placement
from vserve.kernels.linear import fp8_linear as products
from vserve.kernels.linear import linear
from vserve.kernels.linear.dequantize import dequantize
from vserve.kernels.linear.fp8_linear import Fp8Tile, fp8_linear_torch, fp8_linear_triton
from vserve.kernels.linear.fp8_rows import Fp8Rows, add_rms_norm_fp8, fp8_rows, fp8_rows_torch
from vserve.kernels.linear.planes import decoders, pack, unpacked, value_of
from vserve.kernels.linear.quant_linear import QuantTile, quant_linear_triton
from vserve.kernels.norm.norm import add_rms_norm

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")]
DEVICE = torch.device("cuda", 0)
ROWS = (1, 2, 8, 9, 16, 17, 48, 49, 64, 65, 128, 129, 256, 257, 511, 1023, 1024, 4224)
SHAPES = [(4096, 4096), (1000, 4144), (8200, 1040)]  # rows, columns of the weight
TABLE = torch.linspace(-1, 1, 16).tanh()
# bits, dtype of the codes, group (0: a row), what else
LAYOUTS = {
    "int4 G=128": (4, torch.int8, 128, ""),
    "int4 G=64 zeros": (4, torch.uint8, 64, "zeros"),
    "int4 G=32": (4, torch.int8, 32, ""),
    "int4 G=32 minima": (4, torch.uint8, 32, "minima"),
    "int4 rows": (4, torch.int8, 0, ""),
    "int4 ordered": (4, torch.uint8, 128, "order"),
    "int3 G=128": (3, torch.uint8, 128, "zeros"),
    "nf4 G=64": (4, torch.uint8, 64, "table"),
    "mxfp4 G=32": (4, torch.uint8, 32, "e2m1"),
    "nvfp4 G=16": (4, torch.uint8, 16, "e2m1"),
    "int8 rows": (8, torch.int8, 0, ""),
    "int8 G=128 zeros": (8, torch.uint8, 128, "zeros"),
    "int8 G=32": (8, torch.int8, 32, ""),
    "fp8 rows": (8, torch.float8_e4m3fn, 0, ""),
    "fp8 blocks": (8, torch.float8_e4m3fn, 128, ""),
    "mxfp8 G=32": (8, torch.float8_e4m3fn, 32, ""),
    "e5m2 rows": (8, torch.float8_e5m2, 0, ""),
}


def make(layout: str, rows: int, columns: int) -> Codes:
    bits, dtype, group, more = LAYOUTS[layout]
    groups = -(-columns // group) if group else 1
    generator = torch.Generator(DEVICE).manual_seed(len(layout))

    def positive() -> Tensor:
        return (0.5 + torch.rand(rows, groups, generator=generator, device=DEVICE)) / 1000

    if dtype.is_floating_point:
        codes = torch.randn(rows, columns, generator=generator, device=DEVICE).mul_(32).clamp_(-448, 448).to(dtype)
    else:
        low = 0 if dtype == torch.uint8 else -(1 << (bits - 1))
        size = (rows, columns)
        codes = torch.randint(low, low + (1 << bits), size, generator=generator, device=DEVICE, dtype=torch.int32)
        codes = codes.to(dtype)
    table = {"table": TABLE, "e2m1": value_of("e2m1")}.get(more)
    zeros = minima = order = None
    if more in ("zeros", "order"):
        zeros = torch.randint(0, 1 << bits, (rows, groups), generator=generator, device=DEVICE).float()
    if more == "minima":
        minima = 8 * positive()
    if more == "order":
        order = torch.randperm(columns, generator=generator, device=DEVICE)
    return Codes(
        codes, positive(), group or columns, bits, zeros, minima, None if table is None else table.to(DEVICE), order
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_at_every_border(layout: str, dtype: torch.dtype) -> None:
    for n, k in SHAPES if dtype == torch.bfloat16 else SHAPES[1:2]:
        codes = make(layout, n, k)
        assert PackedMatrix.takes(codes, dtype)
        matrix = PackedMatrix(codes, dtype)
        numbers = codes.dequantize().double()
        everything = torch.randn(max(ROWS), k, device=DEVICE).to(dtype)
        expected = everything.double() @ numbers.t()
        size = float(expected.std())
        bias = (torch.randn(n, device=DEVICE) * size).to(dtype)
        for rows in ROWS:
            x = torch.full((rows, k + 8), float("nan"), device=DEVICE, dtype=dtype)
            x[:, :k] = everything[:rows]
            y = matrix(x[:, :k], dtype, bias)
            assert y.shape == (rows, n) and y.dtype == dtype
            exact = expected[:rows] + bias.double()
            # the result is rounded, and so is the sum without the bias; of FP8 inputs 4 bits in all columns
            error = (y.double() - exact).abs() - exact.abs() * torch.finfo(dtype).eps
            limit = 0.25 if matrix.fp8 and rows > matrix.few_rows else 0.03
            assert float(error.max()) / size < limit, (layout, n, k, rows, float(error.max()) / size)
            mean = float((y.double() - expected[:rows] - bias.double()).norm() / expected[:rows].norm())
            assert mean < (0.045 if limit > 0.1 else 0.005), (layout, n, k, rows, mean)
            wide = matrix(x[:, :k], torch.float32)
            assert wide.dtype == torch.float32
            assert float((wide.double() - expected[:rows]).norm() / expected[:rows].norm()) < 0.045


@pytest.mark.parametrize("kind", ["int4", "e2m1", "table", "int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_on_all_codes(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, as numbers in a scratch; here every code stands in every plane."""
    table = tuple(TABLE.tolist()) if kind == "table" else ()
    values = value_of(kind, table, DEVICE)
    codes = torch.arange(256, device=DEVICE, dtype=torch.int32).repeat(64, 2) % len(values)
    codes = torch.where(values[codes].isfinite(), codes, 0)
    codes = torch.stack([row.roll(shift) for shift, row in enumerate(codes)])
    matrix = pack(codes.to(torch.uint8), torch.ones(64, 1, device=DEVICE), kind, 0, None, table)
    assert len(decoders(kind, table, dtype)) in (2, 4)
    assert torch.equal(dequantize(matrix, dtype), values[codes].to(dtype))


@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_tiles_and_splits_agree(rows: int) -> None:
    """However K is split and how far ahead is loaded: but for the order of sums."""
    codes = make("int4 G=128", 4096, 4096)
    matrix = PackedMatrix(codes, torch.bfloat16).matrix
    x = torch.randn(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    expected = x.double() @ codes.dequantize().double().t()
    linear.prepare(DEVICE)
    for tile in (QuantTile(4, 3), QuantTile(4, 5, 2, 4), QuantTile(4, 4, 3, 8), QuantTile(8, 3, 2, 0, 128, 128, True)):
        y = quant_linear_triton(x, matrix, tile=tile)
        assert float((y.double() - expected).norm() / expected.norm()) < 0.004
        for _ in range(20):
            assert torch.equal(quant_linear_triton(x, matrix, tile=tile), y)


@pytest.mark.parametrize("by_group", [False, True])
def test_our_fp8_kernel_is_its_twin(by_group: bool) -> None:
    matrix = PackedMatrix(make("fp8 blocks" if by_group else "fp8 rows", 1000, 4144), torch.bfloat16).matrix
    for rows in (1, 17, 64, 129, 511):
        x = fp8_rows(torch.randn(rows, 4144, device=DEVICE, dtype=torch.bfloat16), by_group)
        expected = fp8_linear_torch(x, matrix, out_dtype=torch.float32)
        for tile in (Fp8Tile(64, 64, 4, 4, 2), Fp8Tile(128, 128, 8, 4, 1), Fp8Tile(16, 64, 4, 3, 4)):
            y = fp8_linear_triton(x, matrix, None, tile, torch.float32)
            assert float((y - expected).norm() / expected.norm()) < 2e-3, (rows, tile)
        if not by_group:
            y = products.fp8_linear(x, matrix, out_dtype=torch.float32)
            assert float((y - expected).norm() / expected.norm()) < 5e-3, rows


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("columns", [4096, 14336, 3000])
def test_quantising_is_its_twin(columns: int, by_group: bool) -> None:
    x, residual, gain = (torch.randn(*size, device=DEVICE, dtype=torch.bfloat16) for size in
                         ((65, columns), (65, columns), (columns,)))  # fmt: skip
    found, twin = fp8_rows(x, by_group), fp8_rows_torch(x, by_group)
    _same(found, twin)
    kept = residual.clone()
    normed = add_rms_norm_fp8(x, kept, gain, 1e-6, 0.5, by_group)
    expected, total = add_rms_norm(x.clone(), residual, gain, 1e-6, 0.5)
    assert torch.equal(kept, total)
    back = fp8_rows_torch(expected, by_group)
    assert float((normed.values.float() - back.values.float()).norm() / back.values.float().norm()) < 0.02
    torch.testing.assert_close(normed.scales, back.scales, rtol=0.01, atol=0)


def _same(found: Fp8Rows, twin: Fp8Rows) -> None:
    torch.testing.assert_close(found.scales, twin.scales, rtol=1e-6, atol=0)
    differ = found.values.view(torch.uint8) != twin.values.view(torch.uint8)
    assert float(differ.float().mean()) < 1e-4, "ties alone"


@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks", "int4", "int8", "nf4"])
def test_a_chain_in_a_cuda_graph(kind: str) -> None:
    """Products, norms and SwiGLU as layers have them, launched while others run: the same bits as one by one."""
    place = Placement(torch.bfloat16, DEVICE)
    layers = []
    generator = torch.Generator(DEVICE).manual_seed(3)
    for _ in range(6):
        pair = Linear(2048, {"gate": 3072, "up": 3072}, place=place), Linear(3072, {"out": 2048}, place=place)
        for layer in pair:
            layer.choose({part: Online(kind) for part in layer.shape.parts})
            layer.create()
            layer.randomize(generator)
            layer.finish()
        layers.append(pair)
    gain = torch.ones(2048, device=DEVICE, dtype=torch.bfloat16)
    for rows in (1, 16, 64, 200):
        start = torch.empty(rows, 2048, device=DEVICE, dtype=torch.bfloat16)
        result = torch.empty_like(start)

        def chain(wait: bool, start: Tensor = start, result: Tensor = result) -> None:
            residual = start + 0
            x: Tensor | None = torch.zeros_like(start)
            for first, second in layers:
                by_group = first.fp8_input(start.shape[0])
                if by_group is not None and x is not None:
                    normed: Tensor | Fp8Rows = add_rms_norm_fp8(x, residual, gain, 1e-6, 1.0, by_group)
                elif by_group is not None:
                    normed = fp8_rows(residual, by_group)
                else:
                    assert x is not None
                    normed, residual = add_rms_norm(x, residual, gain, 1e-6)
                if wait:
                    torch.cuda.synchronize()
                inner = first.activate(normed, "silu", second)
                if wait:
                    torch.cuda.synchronize()
                x = second.add_to(residual, inner)
                if wait:
                    torch.cuda.synchronize()
            result.copy_(residual if x is None else residual + x)

        start.normal_()
        chain(wait=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(wait=False)
        for _ in range(5):
            start.normal_()
            chain(wait=True)
            expected = result.clone()
            assert expected.isfinite().all() and expected.any()
            for _ in range(10):
                result.fill_(float("nan"))
                graph.replay()
                assert torch.equal(result, expected), rows
    assert not linear.prepare(DEVICE).counters.any()


@pytest.mark.parametrize("rows", [1024, 1040, 2048, 4224])
def test_many_rows_are_products_of_numbers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass with what follows, where that is faster: SwiGLU, and what is added to the residual stream."""
    monkeypatch.setattr(packed_module, "dequantized_linear", None)  # piece by piece
    place = Placement(torch.bfloat16, DEVICE)
    gate_up = Linear(4096, {"gate": 14336, "up": 14336}, place=place)
    down = Linear(14336, {"down": 4096}, place=place)
    for layer in (gate_up, down):
        layer.choose(dict.fromkeys(layer.shape.parts, Online("int4")))
        layer.create()
        for part, count in layer.shape.parts.items():
            layer.load(part, {"weight": torch.randn(count, layer.shape.in_features, device=DEVICE).bfloat16() / 64})
        layer.finish()
    x, residual = (torch.randn(rows, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matrices = [unpacked(layer.method._packed.matrix).double() for layer in (gate_up, down)]
    gate, up = (x.double() @ matrices[0].t()).chunk(2, dim=1)
    fused = gate_up.method._packed.silu_mul(x)
    assert (fused is not None) == gate_up.method._packed.products.joins(rows)
    assert fused is not None or rows != 2048 or "H200" not in torch.cuda.get_device_name()
    found, expected = gate_up.method.silu_mul(x), torch.nn.functional.silu(gate) * up
    assert isinstance(found, Tensor) and float((found.double() - expected).norm() / expected.norm()) < 0.006
    wanted = residual.double() + found.double() @ matrices[1].t()
    assert down.method.add_rows is not None and rows >= down.method.add_rows
    assert down.method.multiply(found, residual) is residual
    assert float((residual.double() - wanted).norm() / wanted.norm()) < 0.006


def test_unpacked_is_what_kernels_see() -> None:
    matrix = PackedMatrix(make("int4 G=32 minima", 200, 4144), torch.bfloat16).matrix
    found = dequantize(matrix, torch.bfloat16, 64)
    torch.testing.assert_close(found.float(), unpacked(matrix)[64:], rtol=1 / 128, atol=1e-6)
