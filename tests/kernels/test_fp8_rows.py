"""Activations as FP8: the Triton kernels against their twins, alone and fused with norms and SwiGLU."""

import pytest
import torch
from torch import Tensor

from vserve.kernels.linear import fp8_rows as module
from vserve.kernels.linear.fp8_rows import (
    Fp8Rows,
    Product,
    add_rms_norm_fp8,
    fp8_rows,
    fp8_rows_torch,
    fp8_rows_triton,
    interleaved,
    scaled_torch,
    silu_mul_fp8,
    silu_mul_fp8_triton,
)


def numbers(rows: Fp8Rows) -> Tensor:
    """In the order of the columns again, fp32 [T, K rounded up]."""
    values = rows.values.float().view(len(rows.values), -1, 64, 2).transpose(2, 3).flatten(1)
    scales = rows.scales.t().repeat_interleave(values.shape[1] // len(rows.scales), dim=1)
    return values * scales


def assert_same(found: Fp8Rows, expected: Fp8Rows) -> None:
    """Scales but for rounding; codes at most one step apart, and seldom."""
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
    steps = (found.values.view(torch.int8).int() - expected.values.view(torch.int8).int()).abs()
    assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 0.01
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (3, 300), (2, 64), (5, 1025)])
def test_quantising(rng: torch.Generator, device: str, rows: int, columns: int, by_group: bool) -> None:
    x = torch.full((rows, columns + 3), float("nan"), dtype=torch.float16)
    x[:, :columns] = torch.randn(rows, columns, generator=rng) * 100
    x = x.to(device)[:, :columns]
    x[0] = 0
    found, expected = fp8_rows_triton(x, by_group), fp8_rows_torch(x, by_group)
    assert_same(found, expected)
    assert torch.equal(found.values.view(torch.int8), expected.values.view(torch.int8)), "also at borders"
    back = numbers(found)
    assert not back[:, columns:].any() and not back[0].any()
    error = (back[:, :columns] - x.float()).abs()
    assert bool((error <= x.float().abs() / 16 + numbers(found).abs().amax(1, keepdim=True) / 448 / 500).all())


@pytest.mark.parametrize("by_group", [False, True])
def test_what_is_no_number_stays_none(device: str, by_group: bool) -> None:
    """In the scale: then no product of the row, or the group, is a number."""
    x = torch.ones(3, 300, device=device)
    x[1, 130] = float("nan")
    expected, found = fp8_rows_torch(x, by_group), fp8_rows_triton(x, by_group)
    torch.testing.assert_close(found.scales, expected.scales, equal_nan=True)
    assert found.scales.isnan().sum() == 1 and numbers(found)[1, 128:256].isnan().all()
    swiglu = silu_mul_fp8_triton(torch.cat((x, x), dim=1), torch.float32, by_group)
    assert torch.equal(swiglu.scales.isnan(), expected.scales.isnan())


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_norms(rng: torch.Generator, device: str, add: bool, by_group: bool) -> None:
    x, residual = (torch.randn(3, 200, generator=rng).half().to(device) for _ in range(2))
    weight = torch.randn(200, generator=rng).half().to(device)
    if add:
        sum_, kept = residual.clone(), residual.clone()
        expected = add_rms_norm_fp8(x.cpu(), sum_.cpu(), weight.cpu(), 1e-6, 0.5, by_group)
        found = fp8_rows_triton(x, by_group, weight, 1e-6, residual, 0.5)
        torch.testing.assert_close(residual, (kept.float() + 0.5 * x.float()).half())
    else:
        expected = module.rms_norm_fp8(x.cpu(), weight.cpu(), 1e-6, by_group)
        found = fp8_rows_triton(x, by_group, weight, 1e-6)
    assert_same(Fp8Rows(found.values.cpu(), found.scales.cpu(), found.dtype), expected)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("by_group", [False, True])
def test_silu_mul(rng: torch.Generator, device: str, scaled: bool, by_group: bool) -> None:
    y = torch.randn(3, 2 * 200, generator=rng).half()
    of: Tensor | Product = y
    if scaled:
        of = Product(y, torch.rand(1, 3, generator=rng) + 0.5, torch.rand(400, generator=rng) + 0.5)
    expected = silu_mul_fp8(of, torch.float16, by_group)
    there = Product(*(part.to(device) for part in of)) if isinstance(of, Product) else of.to(device)
    found = silu_mul_fp8_triton(there, torch.float16, by_group)
    assert_same(Fp8Rows(found.values.cpu(), found.scales.cpu(), found.dtype), expected)
    gate, up = (scaled_torch(of) if isinstance(of, Product) else of.float()).chunk(2, dim=1)
    torch.testing.assert_close(numbers(expected)[:, :200], torch.nn.functional.silu(gate) * up, rtol=0.07, atol=0.02)


def test_the_order_of_columns() -> None:
    x = torch.arange(200.0)[None]
    assert interleaved(x)[0, :4].tolist() == [0, 64, 1, 65]
    assert fp8_rows(x).values.shape == (1, 256)
