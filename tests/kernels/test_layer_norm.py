from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vserve.kernels.norm import layer_norm as module

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
PATHS = ["torch", "triton", "public"]


def function(name: str, path: str) -> Callable:
    return getattr(module, name if path == "public" else f"{name}_{path}")


def oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.double()
    wide = wide - wide.mean(dim=-1, keepdim=True)
    normed = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Half a unit in the last place, for one rounding, and what fp32 accumulation may add."""
    rtol = 0.51 * torch.finfo(result.dtype).eps + 2e-6
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (37, 96), (5, 2880), (2, 4096), (7, 3, 128), (128,), (0, 64)])
def test_layer_norm(
    path: str, dtype: torch.dtype, biased: bool, shape: tuple[int, ...], device: str, rng: torch.Generator
) -> None:
    x = (torch.randn(shape, generator=rng) * 3 + 2).to(dtype).to(device)
    weight = torch.randn(shape[-1], generator=rng).to(dtype).to(device)
    bias = torch.randn(shape[-1], generator=rng).to(dtype).to(device) if biased else None
    before = x.clone()
    result = function("layer_norm", path)(x, weight, bias, 1e-5)
    assert result.dtype == dtype and result.shape == x.shape and torch.equal(x, before)
    close(result, oracle(x, weight, bias, 1e-5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("biased", [False, True])
def test_heads_with_weights_of_their_own(path: str, biased: bool, device: str, rng: torch.Generator) -> None:
    """Normalised where they lie in a fused projection; values and the gap between rows stay as they are."""
    buffer = torch.randn(5, 400, generator=rng).to(device)
    before = buffer.clone()
    query, key = buffer[:, :192].view(5, 4, 48), buffer[:, 192:288].view(5, 2, 48)
    for heads in (query, key):
        weight = torch.randn(heads.shape[1:], generator=rng).to(device)
        bias = torch.randn(heads.shape[1:], generator=rng).to(device) if biased else None
        expected = oracle(heads, weight, bias, 1e-6)
        assert function("layer_norm", path)(heads, weight, bias, 1e-6, out=heads).data_ptr() == heads.data_ptr()
        close(heads, expected)
    assert torch.equal(buffer[:, 288:], before[:, 288:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("shape", [(1, 64), (19, 96), (3, 4096), (0, 64)])
def test_add_layer_norm(
    path: str, dtype: torch.dtype, scale: float, shape: tuple[int, int], device: str, rng: torch.Generator
) -> None:
    x = torch.randn(shape, generator=rng).to(dtype).to(device)
    wide = torch.full((shape[0], shape[1] + 16), 7.0, dtype=dtype, device=device)
    residual = wide[:, : shape[1]]
    residual.copy_((torch.randn(shape, generator=rng) * 5).to(dtype))
    weight = torch.randn(shape[1], generator=rng).to(dtype).to(device)
    total = (residual.double() + scale * x.double()).to(dtype)
    normed, result = function("add_layer_norm", path)(x, residual, weight, None, 1e-5, scale)
    assert result.data_ptr() == residual.data_ptr() and normed.dtype == dtype
    assert (wide[:, shape[1] :] == 7).all()
    torch.testing.assert_close(result, total, rtol=torch.finfo(dtype).eps, atol=1e-6)
    # The norm is of the rounded sum.
    close(normed, oracle(result, weight, None, 1e-5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("large", [3e38, float("inf"), float("nan")])
def test_squares_beyond_fp32_are_no_numbers(path: str, large: float, device: str, rng: torch.Generator) -> None:
    """Not 0, which every later layer takes for a result; the rows beside it are as they were."""
    x = torch.randn(3, 64, generator=rng).to(device)
    weight = torch.ones(64, device=device)
    x[1, 5] = large
    result = function("layer_norm", path)(x, weight, None, 1e-5)
    assert result[1].isnan().all()
    close(result[[0, 2]], oracle(x[[0, 2]], weight, None, 1e-5))


@pytest.mark.parametrize("dim", [96, 2048])
def test_a_row_does_not_depend_on_the_others(dim: int, device: str, rng: torch.Generator) -> None:
    x = torch.randn(33, dim, generator=rng).to(device)
    weight = torch.randn(dim, generator=rng).to(device)
    together = module.layer_norm_triton(x, weight, None, 1e-5)
    for row in (0, 5, 32):
        assert torch.equal(module.layer_norm_triton(x[row : row + 1], weight, None, 1e-5)[0], together[row])
