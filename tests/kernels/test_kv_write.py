"""Writing keys and values into the paged cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.attention.attention import decode_attention
from vserve.kernels.attention.attention_parts import PagedCache, Scoring, UniformBatch
from vserve.kernels.attention.rope_kv import rope_write_kv, rope_write_kv_triton, write_kv_torch


def unrotated(function: Callable[..., None]) -> Callable[..., None]:
    """rope_write_kv with angles that turn nothing: it writes keys as they are."""

    def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        positions = torch.zeros(len(key), dtype=torch.int32, device=key.device)
        half = torch.zeros(1, key.shape[-1] // 2, device=key.device)
        cos_sin = torch.cat((half.cos(), half.sin()), dim=1)
        function(key.clone(), key, value, positions, cos_sin, key_cache, value_cache, slots)

    return write


WRITE: dict[str, Callable[..., None]] = {
    "torch": write_kv_torch,
    "triton": unrotated(rope_write_kv_triton),
    "public": unrotated(rope_write_kv),
}

CASES: dict[str, dict[str, Any]] = {
    "one_token": {"tokens": 1},
    "one_padding_token": {"tokens": 1, "padding": 1},
    "batch": {"tokens": 37},
    "padding": {"tokens": 20, "padding": 7},
    "only_padding": {"tokens": 5, "padding": 5},
    "no_tokens": {"tokens": 0},
    "one_head_size80": {"tokens": 9, "kv_heads": 1, "size": 80},
    "three_heads_size128": {"tokens": 9, "kv_heads": 3, "size": 128},
    "value_smaller": {"tokens": 9, "size": 96, "value_size": 64},
    "value_larger": {"tokens": 9, "size": 16, "value_size": 40},
    "page_not_power_of_two": {"tokens": 30, "page": 12},
    "narrower_cache": {"tokens": 9, "cache_dtype": torch.float16},
}


@pytest.mark.parametrize("implementation", WRITE)
@pytest.mark.parametrize("case", CASES)
def test_write_kv(case: str, implementation: str, rng: torch.Generator, device: str) -> None:
    options = {"padding": 0, "kv_heads": 2, "size": 64, "page": 16, "cache_dtype": None, **CASES[case]}
    tokens, kv_heads, size, page = (options[name] for name in ("tokens", "kv_heads", "size", "page"))
    value_size = options.get("value_size", size)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cache_dtype = options["cache_dtype"] or dtype
        # Slices of a fused qkv product: token stride larger than the heads', values not at a round offset.
        width = 2 * size + kv_heads * (size + value_size)
        qkv = torch.randn(tokens, width, generator=rng).to(device, dtype)
        _, key, value = qkv.split([2 * size, kv_heads * size, kv_heads * value_size], dim=1)
        key, value = key.view(tokens, kv_heads, size), value.view(tokens, kv_heads, value_size)
        num_blocks = 8
        slots = torch.randperm(num_blocks * page, generator=rng)[:tokens].to(torch.int32)
        slots[torch.randperm(tokens, generator=rng)[: options["padding"]]] = -1
        key_cache = torch.randn(num_blocks, page, kv_heads, size, generator=rng).to(device, cache_dtype)
        value_cache = torch.randn(num_blocks, page, kv_heads, value_size, generator=rng).to(device, cache_dtype)

        expected_key, expected_value = key_cache.clone(), value_cache.clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected_key[slot // page, slot % page] = key[token].to(cache_dtype)
                expected_value[slot // page, slot % page] = value[token].to(cache_dtype)
        WRITE[implementation](key, value, key_cache, value_cache, slots.to(device))
        assert torch.equal(key_cache, expected_key)
        assert torch.equal(value_cache, expected_value)


@pytest.mark.parametrize("implementation", WRITE)
def test_strided_cache(implementation: str, rng: torch.Generator, device: str) -> None:
    """Keys and values in one buffer, heads before slots."""
    buffer = torch.zeros(4, 2, 3, 16, 32, device=device)  # blocks, key or value, heads, page, size
    key_cache, value_cache = buffer[:, 0].transpose(1, 2), buffer[:, 1].transpose(1, 2)
    key, value = torch.randn(2, 5, 3, 32, generator=rng).to(device)
    slots = torch.tensor([63, 0, -1, 17, 16], dtype=torch.int32, device=device)
    WRITE[implementation](key, value, key_cache, value_cache, slots)
    for token, (block, offset) in {0: (3, 15), 1: (0, 0), 3: (1, 1), 4: (1, 0)}.items():
        assert torch.equal(buffer[block, 0, :, offset], key[token])
        assert torch.equal(buffer[block, 1, :, offset], value[token])
    assert int((buffer.abs().sum(-1) > 0).sum()) == 4 * 2 * 3, "wrote elsewhere"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_caches_beyond_int32_offsets(rng: torch.Generator, device: str) -> None:
    """More than 2^31 elements a cache: slot times stride needs 64 bits, in the writing and in the reading."""
    kv_heads, size, page = 8, 128, 16
    num_blocks = (1 << 31) // (page * kv_heads * size) + 64
    if torch.cuda.mem_get_info()[0] < 3 * num_blocks * page * kv_heads * size * 2:
        pytest.skip("not enough free GPU memory")
    key_cache = torch.zeros(num_blocks, page, kv_heads, size, dtype=torch.float16, device=device)
    value_cache = torch.zeros_like(key_cache)
    key, value = torch.randn(2, 1, kv_heads, size, generator=rng).to(device, torch.float16)
    block = num_blocks - 2
    slots = torch.tensor([block * page], dtype=torch.int32, device=device)
    WRITE["triton"](key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache[block, 0], key[0])
    assert torch.equal(value_cache[block, 0], value[0])
    assert int(key_cache.view(num_blocks, -1).any(dim=1).sum()) == 1, "wrote elsewhere"
    table = torch.full((1, 1), block, dtype=torch.int32, device=device)
    row, one = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    query = torch.randn(1, 32, size, generator=rng).to(device, torch.float16)
    out = decode_attention(query, PagedCache(key_cache, value_cache, table), UniformBatch(row, one), Scoring(0.1))
    torch.testing.assert_close(out, value.repeat_interleave(4, dim=1))  # a single key has all the weight
