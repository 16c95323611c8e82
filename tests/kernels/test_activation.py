from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from vserve.kernels.norm import activation

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
NAMES = ["silu_mul", "gelu_tanh_mul"]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's, in the interpreter


def function(name: str, path: str) -> Callable:
    return getattr(activation, name if path == "public" else f"{name}_{path}")


def oracle(name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    if name == "silu_mul":
        return gate / (1 + torch.exp(-gate)) * up
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def close(result: torch.Tensor, name: str, x: torch.Tensor) -> None:
    expected = oracle(name, x)
    gate, up = x.double().chunk(2, dim=-1)
    # Half a unit in the last place; and where 1 + tanh cancels, fp32 is accurate relative to the gate only. The last
    # term is half the smallest fp16.
    allowed = (0.51 * torch.finfo(result.dtype).eps + 3e-6) * expected.abs() + 3e-7 * (gate * up).abs() + 6e-8
    assert ((result.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("path", ["torch", "triton", "public"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 48), (2, 1500), (0, 16)])
def test_against_float64(
    path: str, name: str, dtype: torch.dtype, shape: tuple[int, int], device: str, rng: torch.Generator
) -> None:
    num_tokens, size = shape
    x = (torch.randn(num_tokens, 2 * size, generator=rng) * 3).to(dtype).to(device)
    result = function(name, path)(x)
    assert result.shape == (num_tokens, size) and result.dtype == dtype
    close(result, name, x)


@pytest.mark.parametrize("path", ["torch", "triton", "public"])
@pytest.mark.parametrize("name", NAMES)
def test_strided_rows_and_out(path: str, name: str, device: str, rng: torch.Generator) -> None:
    x = torch.randn(4, 90, generator=rng).to(device)[:, 10:70]
    buffer = torch.full((4, 40), float("nan"), device=device)
    function(name, path)(x, out=buffer[:, 5:35])
    close(buffer[:, 5:35], name, x)
    assert buffer[:, :5].isnan().all() and buffer[:, 35:].isnan().all()


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_gates_stay_finite(path: str, name: str, device: str) -> None:
    gate = torch.tensor([[-1e4, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e4]], device=device)
    result = function(name, path)(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    torch.testing.assert_close(result, gate.clamp(min=0), rtol=1e-6, atol=1e-6)
