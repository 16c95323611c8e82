"""Rotation, with and without the norm before it, against Python's floats: in plain torch, and as the part of
rope_write_kv's kernel."""

from __future__ import annotations

import math

import pytest
import torch

from vserve.kernels.attention import rope_kv
from vserve.kernels.attention.rope import apply_rope_torch, apply_rope_triton, qk_norm_rope_torch

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
PATHS = ["torch", "triton", "alone"]
# (query heads, key heads, head size, rotated dimensions)
SHAPES = [(4, 2, 16, 16), (9, 3, 24, 24), (5, 1, 20, 8), (8, 8, 8, 8), (12, 2, 12, 6), (2, 2, 64, 32)]


def table(rot_dim: int, max_pos: int = 64) -> torch.Tensor:
    angles = torch.arange(max_pos)[:, None] * 100.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotated(heads: torch.Tensor, positions: list[int], cos_sin: torch.Tensor, weight: torch.Tensor | None, eps: float):
    """One number at a time, in Python's floats."""
    result = heads.double().cpu()
    cos_sin = cos_sin.double().cpu()
    half = cos_sin.shape[1] // 2
    for token, position in enumerate(positions):
        for head in range(heads.shape[1]):
            values = result[token, head].tolist()
            if weight is not None:
                scale = 1 / math.sqrt(sum(value * value for value in values) / len(values) + eps)
                values = [value * scale * gain for value, gain in zip(values, weight.tolist(), strict=True)]
            for i in range(half):
                cos, sin = float(cos_sin[position, i]), float(cos_sin[position, half + i])
                first, second = values[i], values[half + i]
                values[i], values[half + i] = first * cos - second * sin, second * cos + first * sin
            result[token, head] = torch.tensor(values, dtype=torch.float64)
    return result


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    eps = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double().cpu(), expected, rtol=0.51 * eps + 1e-6, atol=2e-6)


def rotate(path: str, query: torch.Tensor, key: torch.Tensor, *rest: object) -> None:
    """In place; `rest` is positions, cos_sin, and the norm's weights and eps. Keys of "triton" go through a cache;
    "alone" is the kernel that only rotates."""
    if path == "alone":
        if len(rest) > 2:
            pytest.skip("it has no norm")
        apply_rope_triton(query, key, *rest)  # type: ignore[arg-type]
        return
    if path == "torch":
        (apply_rope_torch if len(rest) == 2 else qk_norm_rope_torch)(query, key, *rest)  # type: ignore[arg-type]
        return
    positions, cos_sin, *norm = rest
    cache = key.new_full((len(key) + 1, 1, *key.shape[1:]), float("nan"))
    slots = torch.arange(len(key), dtype=torch.int32, device=key.device)
    rope_kv.rope_write_kv_triton(query, key, key, positions, cos_sin, cache, cache.clone(), slots, *norm)  # type: ignore
    assert cache[-1].isnan().all()
    key.copy_(cache[:-1, 0])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_views_of_a_fused_projection(
    norm: bool, path: str, dtype: torch.dtype, shape: tuple[int, int, int, int], device: str, rng: torch.Generator
) -> None:
    num_heads, num_key_heads, dim, rot_dim = shape
    positions = [0, 17, 3, 63, 0, 0]  # two padding tokens at the end
    width = (num_heads + 2 * num_key_heads) * dim
    qkv = torch.randn(len(positions), width + 8, generator=rng).to(dtype).to(device)
    before = qkv.clone()
    query = qkv[:, : num_heads * dim].view(-1, num_heads, dim)
    key = qkv[:, num_heads * dim : (num_heads + num_key_heads) * dim].view(-1, num_key_heads, dim)
    cos_sin = table(rot_dim).to(device)
    weights = [torch.randn(dim, generator=rng).to(dtype).to(device) if norm else None for _ in range(2)]
    expected = [
        rotated(heads, positions, cos_sin, weight, 1e-6) for heads, weight in zip((query, key), weights, strict=True)
    ]
    arguments = [query, key, torch.tensor(positions, dtype=torch.int32, device=device), cos_sin]
    if norm:
        arguments += [*weights, 1e-6]
    rotate(path, *arguments)
    close(query, expected[0])
    close(key, expected[1])
    behind = (num_heads + num_key_heads) * dim
    assert torch.equal(qkv[:, behind:], before[:, behind:])
    if not norm:
        assert torch.equal(query[..., rot_dim:], before[:, : num_heads * dim].view_as(query)[..., rot_dim:])
        assert torch.equal(query[0], before[0, : num_heads * dim].view(num_heads, dim))  # position 0 turns nothing


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["apart", "key first", "key rows longer", "key heads apart"])
def test_query_and_key_anywhere(path: str, order: str, device: str, rng: torch.Generator) -> None:
    """The twin joins query and key into one view only where that is right."""
    positions = [5, 9, 60]
    if order == "apart":
        query, key = torch.randn(3, 4, 16, generator=rng).to(device), torch.randn(3, 2, 16, generator=rng).to(device)
    elif order == "key first":
        buffer = torch.randn(3, 6, 16, generator=rng).to(device)
        query, key = buffer[:, 2:], buffer[:, :2]
    elif order == "key heads apart":
        buffer = torch.randn(3, 64 + 40, generator=rng).to(device)
        query, key = buffer[:, :64].view(3, 4, 16), buffer[:, 64:].view(3, 2, 20)[..., :16]
    else:
        query = torch.randn(3, 4, 16, generator=rng).to(device)
        key = torch.randn(3, 2, 20, generator=rng).to(device)[..., :16]
    cos_sin = table(16).to(device)
    expected = [rotated(heads, positions, cos_sin, None, 0.0) for heads in (query, key)]
    rotate(path, query, key, torch.tensor(positions, dtype=torch.int32, device=device), cos_sin)
    close(query, expected[0])
    close(key, expected[1])


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens(path: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_kv, "_rope_write_kv_kernel", None)  # on a GPU it is an error to launch no program
    query, key = torch.empty(0, 4, 16, device=device), torch.empty(0, 2, 16, device=device)
    rotate(path, query, key, torch.empty(0, dtype=torch.int32, device=device), table(16).to(device))


@pytest.mark.parametrize("path", PATHS)
def test_squares_beyond_fp32_are_no_numbers(path: str, device: str, rng: torch.Generator) -> None:
    """Of one head; the others are as they were."""
    query, key = (torch.randn(2, 3, 24, generator=rng).to(device) for _ in range(2))
    query[1, 2, 23] = 3e19
    positions = torch.tensor([5, 7], dtype=torch.int32, device=device)
    weight = torch.ones(24, device=device)
    rotate(path, query, key, positions, table(16).to(device), weight, weight, 1e-5)
    assert query[1, 2].isnan().all()
    assert query[0].isfinite().all() and query[1, :2].isfinite().all() and key.isfinite().all()
