"""Matrices quantised on the way in: how far they may be off, and by which rule."""

from __future__ import annotations

import pytest
import torch

from vserve.engine.quant.codes import Codes
from vserve.engine.quant.quantize import to_fp8, to_fp8_blocks, to_int4, to_int8, to_nf4

ROWS, COLUMNS = 130, 200  # nothing divides them


@pytest.fixture
def weights() -> torch.Tensor:
    """Rows of very different size, one without any weight, and two that stay on one side of zero."""
    torch.manual_seed(1)
    found = 0.02 * torch.randn(ROWS, COLUMNS) * torch.logspace(-3, 3, ROWS).unsqueeze(1)
    found[5] = 0
    found[6] = 1 + found[6].abs()
    found[8] = -found[6]
    return found


def spread(codes: Codes) -> torch.Tensor:
    """[N, K]: the scale of each element."""
    return codes.scales.repeat_interleave(codes.group, dim=1)[:, : codes.shape[1]]


def test_int4_is_off_by_half_a_step_and_zero_stays_zero(weights: torch.Tensor) -> None:
    weights[20:, ::7] = 0
    codes = to_int4(weights)
    assert codes.codes.dtype == torch.uint8 and int(codes.codes.max()) == 15 and codes.group == 128
    assert codes.scales.shape == (ROWS, 2) and codes.zeros is not None
    assert torch.equal(codes.zeros, codes.zeros.round()) and 0 <= codes.zeros.min() <= codes.zeros.max() <= 15
    dequantized = codes.dequantize()
    # The zero point is rounded too, which may cut half a step off the ends of a range.
    assert ((dequantized - weights).abs() <= spread(codes) * 1.001).all()
    inside = (codes.codes > 0) & (codes.codes < 15)
    assert ((dequantized - weights).abs() <= spread(codes) * 0.501)[inside].all()
    assert not dequantized[weights == 0].any()


def test_int4_is_closer_than_it_would_be_around_zero() -> None:
    torch.manual_seed(0)
    weights = 0.02 * torch.randn(64, 4096)
    grouped = weights.view(64, -1, 128)
    scales = grouped.abs().amax(2, keepdim=True) / 7.5
    even = ((grouped / scales).round().clamp(-8, 7) * scales).view_as(weights)
    error = (to_int4(weights).dequantize() - weights).square().mean()
    assert error < 0.95 * (even - weights).square().mean()
    assert (error / weights.square().mean()).sqrt() < 0.11


def test_int8(weights: torch.Tensor) -> None:
    codes = to_int8(weights)
    assert codes.codes.dtype == torch.int8 and codes.scales.shape == (ROWS, 1)
    assert ((codes.dequantize() - weights).abs() <= spread(codes) * 0.501).all()
    assert codes.codes[torch.arange(ROWS) != 5].abs().amax(1).eq(127).all()  # the range is used


def check_e4m3(codes: Codes, weights: torch.Tensor) -> None:
    assert codes.codes.dtype == torch.float8_e4m3fn and codes.bits == 8
    error = (codes.dequantize() - weights).abs()
    # 3 bits of mantissa: a sixteenth; below 2^-6 steps of 2^-9
    assert (error <= torch.maximum(weights.abs() / 16, spread(codes) * 2.0**-10) * 1.001).all()
    assert not codes.codes.float().isnan().any()


def test_fp8_a_scale_a_row(weights: torch.Tensor) -> None:
    codes = to_fp8(weights)
    check_e4m3(codes, weights)
    assert torch.equal(codes.scales[7], weights[7].abs().max().view(1) / 448)
    assert codes.codes[7].float().abs().max() == 448


def test_fp8_a_scale_a_block(weights: torch.Tensor) -> None:
    codes = to_fp8_blocks(weights)
    check_e4m3(codes, weights)
    assert codes.group == 128 and codes.scales.shape == (ROWS, 2)
    for rows in (slice(0, 128), slice(128, 130)):
        for index, columns in enumerate((slice(0, 128), slice(128, 200))):
            assert codes.scales[rows, index].unique().tolist() == [float(weights[rows, columns].abs().max() / 448)]


def test_nf4_takes_the_nearest_of_its_table(weights: torch.Tensor) -> None:
    codes = to_nf4(weights)
    assert codes.table is not None and codes.scales.shape == (ROWS, 4)
    distances = (weights.unsqueeze(2) - codes.table * spread(codes).unsqueeze(2)).abs()
    error = (codes.dequantize() - weights).abs()
    torch.testing.assert_close(error, distances.amin(2), rtol=1e-5, atol=0)
    assert to_nf4(weights, block=32).scales.shape == (ROWS, 7)


@pytest.mark.parametrize("quantize", [to_int4, to_int8, to_fp8, to_fp8_blocks, to_nf4])
def test_of_bfloat16_as_of_the_same_numbers(quantize, weights: torch.Tensor) -> None:
    short = weights.bfloat16()
    before = short.clone()
    assert torch.equal(quantize(short).dequantize(), quantize(short.float()).dequantize())
    assert torch.equal(short, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("quantize", [to_int4, to_int8, to_fp8, to_fp8_blocks, to_nf4])
def test_on_a_gpu_as_on_a_cpu(quantize, weights: torch.Tensor) -> None:
    here, there = quantize(weights), quantize(weights.cuda())
    assert torch.equal(here.scales, there.scales.cpu())
    assert torch.equal(here.codes.view(torch.uint8), there.codes.cpu().view(torch.uint8))


@pytest.mark.parametrize("quantize", [to_int4, to_int8, to_fp8, to_fp8_blocks, to_nf4])
def test_the_input_is_left_alone_and_narrow_matrices_have_one_group(quantize) -> None:
    weights = torch.randn(3, 24)
    before = weights.clone()
    codes = quantize(weights)
    assert torch.equal(weights, before)
    assert codes.group == 24 and codes.scales.shape == (3, 1)
    assert torch.allclose(codes.dequantize(), weights, atol=0.5)
