from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vserve.kernels.norm import norm

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
PATHS = ["torch", "triton", "public"]


def function(name: str, path: str) -> Callable:
    return getattr(norm, name if path == "public" else f"{name}_{path}")


def tolerance(dtype: torch.dtype) -> float:
    """Half a unit in the last place, for one rounding, and what fp32 accumulation may add."""
    return 0.51 * torch.finfo(dtype).eps + 2e-6


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=tolerance(result.dtype), atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (37, 96), (5, 2880), (2, 4096), (1, 16384), (7, 3, 128), (128,)])
def test_rms_norm(path: str, dtype: torch.dtype, shape: tuple[int, ...], device: str, rng: torch.Generator) -> None:
    x = (torch.randn(shape, generator=rng) * 3).to(dtype).to(device)
    weight = torch.randn(shape[-1], generator=rng).to(dtype).to(device)
    before = x.clone()
    result = function("rms_norm", path)(x, weight, 1e-5)
    assert result.dtype == dtype and result.shape == x.shape and torch.equal(x, before)
    close(result, oracle(x, weight, 1e-5))


@pytest.mark.parametrize("path", PATHS)
def test_views_of_a_fused_projection(path: str, device: str, rng: torch.Generator) -> None:
    """Query and key heads, normalised where they lie; value heads and the gap between rows stay as they are."""
    buffer = torch.randn(5, 400, generator=rng).to(device)
    before = buffer.clone()
    query, key = buffer[:, :192].view(5, 4, 48), buffer[:, 192:288].view(5, 2, 48)
    weight = torch.randn(48, generator=rng).to(device)
    for heads in (query, key):
        expected = oracle(heads, weight, 1e-6)
        assert function("rms_norm", path)(heads, weight, 1e-6, out=heads).data_ptr() == heads.data_ptr()
        close(heads, expected)
    assert torch.equal(buffer[:, 288:], before[:, 288:])


@pytest.mark.parametrize("path", PATHS)
def test_out_is_filled_and_nothing_else(path: str, device: str, rng: torch.Generator) -> None:
    x = torch.randn(9, 100, generator=rng).to(device)
    weight = torch.randn(100, generator=rng).to(device)
    buffer = torch.full((9, 130), float("nan"), device=device)
    function("rms_norm", path)(x, weight, 1e-5, out=buffer[:, 10:110])
    close(buffer[:, 10:110], oracle(x, weight, 1e-5))
    assert buffer[:, :10].isnan().all() and buffer[:, 110:].isnan().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (19, 96), (3, 4096), (0, 64)])
def test_add_rms_norm(path: str, dtype: torch.dtype, shape: tuple[int, int], device: str, rng: torch.Generator) -> None:
    x = torch.randn(shape, generator=rng).to(dtype).to(device)
    wide = torch.full((shape[0], shape[1] + 16), 7.0, dtype=dtype, device=device)
    residual = wide[:, : shape[1]]
    residual.copy_((torch.randn(shape, generator=rng) * 5).to(dtype))
    weight = torch.randn(shape[1], generator=rng).to(dtype).to(device)
    total = x + residual
    normed, result = function("add_rms_norm", path)(x, residual, weight, 1e-5)
    assert result.data_ptr() == residual.data_ptr() and normed.dtype == dtype
    assert torch.equal(result, total) and (wide[:, shape[1] :] == 7).all()
    # The norm is of the rounded sum.
    close(normed, oracle(total, weight, 1e-5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_can_be_scaled(path: str, dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    x = torch.randn(7, 96, generator=rng).to(dtype).to(device)
    residual = (torch.randn(7, 96, generator=rng) * 5).to(dtype).to(device)
    weight = torch.randn(96, generator=rng).to(device)  # of norms that are stored less one: fp32 beside any dtype
    total = (residual.double() + 0.22 * x.double()).to(dtype)
    normed, result = function("add_rms_norm", path)(x, residual, weight, 1e-5, 0.22)
    torch.testing.assert_close(result, total, rtol=torch.finfo(dtype).eps, atol=1e-6)
    close(normed, oracle(result, weight, 1e-5))


@pytest.mark.parametrize("path", PATHS)
def test_residual_of_another_dtype(path: str, device: str, rng: torch.Generator) -> None:
    x = torch.randn(4, 64, generator=rng).half().to(device)
    residual = torch.randn(4, 64, generator=rng).to(device)
    weight = torch.ones(64, device=device)
    total = x.float() + residual
    normed, result = function("add_rms_norm", path)(x, residual, weight, 1e-5)
    assert normed.dtype == torch.float16 and torch.equal(result, total)
    close(normed, oracle(total, weight, 1e-5))


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_zeros_and_extremes(path: str, device: str) -> None:
    x = torch.zeros(3, 64, device=device)
    x[1] = 1e18  # the sum of squares is still finite in fp32
    x[2] = 1e-18
    result = function("rms_norm", path)(x, torch.ones(64, device=device), 1e-5)
    assert (result[0] == 0).all() and result.isfinite().all()
    close(result, oracle(x, torch.ones(64, device=device), 1e-5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("large", [3e19, 3e38, float("inf"), float("nan")])
def test_squares_beyond_fp32_are_no_numbers(path: str, large: float, device: str, rng: torch.Generator) -> None:
    """Not 0, which every later layer takes for a result; the rows beside it are as they were."""
    x = torch.randn(3, 64, generator=rng).to(device)
    weight = torch.ones(64, device=device)
    x[1, 5] = large
    result = function("rms_norm", path)(x, weight, 1e-5)
    assert result[1].isnan().all()
    close(result[[0, 2]], oracle(x[[0, 2]], weight, 1e-5))
    normed, _ = function("add_rms_norm", path)(torch.zeros_like(x), x, weight, 1e-5)
    assert normed[1].isnan().all()
    close(normed[[0, 2]], oracle(x[[0, 2]], weight, 1e-5))


@pytest.mark.parametrize("dim", [96, 2048])
def test_a_row_does_not_depend_on_the_others(dim: int, device: str, rng: torch.Generator) -> None:
    x = torch.randn(33, dim, generator=rng).to(device)
    weight = torch.randn(dim, generator=rng).to(device)
    together = norm.rms_norm_triton(x, weight, 1e-5)
    for row in (0, 5, 32):
        assert torch.equal(norm.rms_norm_triton(x[row : row + 1], weight, 1e-5)[0], together[row])


def test_a_strided_last_dimension_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="stride 1"):
        norm.rms_norm_triton(torch.ones(4, 8, device=device).T, torch.ones(4, device=device), 1e-5)
