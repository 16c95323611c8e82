"""Products of FP8 with FP8, and of dequantised codes: the Triton kernels against their twins."""

import pytest
import torch

from vserve.kernels.linear import dequantize as dequantize_module
from vserve.kernels.linear import linear
from vserve.kernels.linear.dequantize import dequantize, dequantize_triton, dequantized_linear
from vserve.kernels.linear.fp8_linear import (
    Fp8Tile,
    fp8_gate,
    fp8_linear,
    fp8_linear_torch,
    fp8_linear_triton,
    scaled,
    scaled_triton,
    takes_fp8,
)
from vserve.kernels.linear.fp8_rows import Product, fp8_rows_torch
from vserve.kernels.linear.planes import Packed, pack, unpacked

CUDA = torch.cuda.is_available()


def weight(rng: torch.Generator, n: int, k: int, group: int, device: str) -> Packed:
    codes = torch.randn(n, k, generator=rng).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(n, -(-k // group) if group else 1, generator=rng) / 64
    return pack(codes.to(device), scales.to(device), "e4m3", group)


CASES = [
    # group, by_group, m, n, k, tile
    (0, False, 1, 70, 256, Fp8Tile(16, 64, 4, 3, 2)),
    (0, False, 17, 64, 200, Fp8Tile(64, 64, 4, 3, 1)),
    (128, True, 3, 130, 300, Fp8Tile(16, 128, 4, 3, 2)),
    (256, True, 2, 64, 512, Fp8Tile(16, 64, 4, 3, 1)),
    (128, False, 2, 20, 128, Fp8Tile(16, 64, 4, 3, 1)),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("group", "by_group", "m", "n", "k", "tile"), CASES)
def test_our_kernel(
    rng: torch.Generator, device: str, group: int, by_group: bool, m: int, n: int, k: int, tile: Fp8Tile, bias: bool
) -> None:
    matrix = weight(rng, n, k, group, device)
    assert takes_fp8(matrix)
    x = fp8_rows_torch(torch.randn(m, k, generator=rng).to(device), by_group)
    b = torch.randn(n, generator=rng).to(device) if bias else None
    workspace = linear.prepare(x.values.device)
    workspace.partials.fill_(float("nan"))
    y = fp8_linear_triton(x, matrix, b, tile)
    expected = fp8_linear_torch(x, matrix, b)
    limit = 2e-3 if CUDA else 1e-5  # the tensor cores add up some 14 bits
    assert float((y - expected).abs().max()) <= limit * float(expected.abs().max())
    assert not workspace.counters.any()


def test_the_twin_is_the_product_of_what_was_quantised(rng: torch.Generator) -> None:
    for group in (0, 128):
        matrix = weight(rng, 20, 200, group, "cpu")
        x = torch.randn(3, 200, generator=rng)
        expected = x @ unpacked(matrix).t()
        y = fp8_linear(fp8_rows_torch(x, bool(group)), matrix)
        assert float((y - expected).abs().max()) <= 0.05 * float(expected.abs().max())
        residual = expected.clone()
        assert fp8_linear(fp8_rows_torch(x, bool(group)), matrix, residual=residual) is residual
        torch.testing.assert_close(residual, expected + y)
        torch.testing.assert_close(fp8_gate(fp8_rows_torch(x, bool(group)), matrix), y)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_scaling(rng: torch.Generator, device: str, add: bool, bias: bool) -> None:
    values = torch.randn(3, 40, generator=rng).half()[:, :37]
    y = Product(values, torch.rand(1, 3, generator=rng), torch.rand(37, generator=rng))
    b = torch.randn(37, generator=rng) if bias else None
    residual = torch.randn(3, 37, generator=rng) if add else None
    expected = scaled(y, torch.float32, b, None if residual is None else residual.clone())
    there = Product(*(part.to(device) for part in y))
    found = scaled_triton(
        there, torch.float32, None if b is None else b.to(device), None if residual is None else residual.to(device)
    )
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize(
    ("kind", "group", "shifts"), [("int4", 32, True), ("int4", 128, False), ("int8", 0, False), ("e4m3", 128, False)]
)
def test_dequantising(rng: torch.Generator, device: str, kind: str, group: int, shifts: bool) -> None:
    codes = torch.randint(0, 16, (130, 300), generator=rng).to(torch.uint8)
    scales = torch.rand(130, -(-300 // group) if group else 1, generator=rng)
    matrix = pack(codes.to(device), scales.to(device), kind, group, scales.to(device) + 1 if shifts else None)
    found = dequantize_triton(matrix, 64, torch.empty(66, 300, dtype=torch.float16, device=device))
    torch.testing.assert_close(found, unpacked(matrix, torch.float16)[64:], rtol=1e-3, atol=1e-4)
    assert torch.equal(dequantize(matrix, torch.float16, 64), found) or not CUDA
    with pytest.raises(ValueError, match="tiles"):
        dequantize_triton(matrix, 3, found)


def test_a_scratch_grows_for_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize_module, "_scratches", {})
    monkeypatch.setattr(dequantize_module, "SCRATCH", 100)
    monkeypatch.setattr(dequantize_module, "LARGEST", 1000)
    device = torch.device("cpu")
    sizes = [len(dequantize_module.prepare_scratch(device, torch.float16, wanted)) for wanted in (0, 800, 200, 1001)]
    assert sizes == [100, 800, 800, 800]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call prepare_scratch first"):
        dequantize_module.prepare_scratch(torch.device("cuda", 0), torch.float16)


def test_graphs_keep_the_scratch_that_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a larger model that is loaded later in the process replaces it."""
    monkeypatch.setattr(dequantize_module, "_captured", kept := [])
    first, second = torch.empty(1), torch.empty(2)
    for capturing, scratch, count in ((False, first, 0), (True, first, 1), (True, first, 1), (True, second, 2)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert dequantize_module._written(scratch) is scratch and len(kept) == count


def test_dequantised_twin(rng: torch.Generator) -> None:
    matrix = weight(rng, 20, 200, 128, "cpu")
    x, bias = torch.randn(3, 200, generator=rng), torch.randn(20, generator=rng)
    torch.testing.assert_close(dequantized_linear(x, matrix, bias), x @ unpacked(matrix).t() + bias)
