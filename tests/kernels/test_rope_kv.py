"""Rotation and cache write in one launch: against the functions it stands for, which have tests of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vserve.kernels.attention.rope import apply_rope_torch, qk_norm_rope_torch
from vserve.kernels.attention.rope_kv import rope_write_kv, rope_write_kv_torch, rope_write_kv_triton, write_kv_torch
from vserve.kernels.launch import pdl

PATHS: dict[str, Callable[..., None]] = {
    "torch": rope_write_kv_torch,
    "triton": rope_write_kv_triton,
    "public": rope_write_kv,
}
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
PAGE, BLOCKS = 4, 5

CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "one_token": {"slots": [7]},
    "one_padding_token": {"slots": [-1]},
    "only_padding": {"slots": [-1, -1, -1]},
    "no_tokens": {"slots": []},
    "mha": {"heads": 3, "kv_heads": 3},
    "one_kv_head": {"heads": 5, "kv_heads": 1},
    "several_groups": {"heads": 20, "kv_heads": 10, "size": 8},
    "size_not_power_of_two": {"heads": 9, "kv_heads": 3, "size": 24},
    "partial": {"heads": 5, "kv_heads": 2, "size": 20, "rot_dim": 8},
    "partial_one_tail": {"heads": 12, "size": 12, "rot_dim": 6},
    "value_smaller": {"value_size": 10},
    "value_larger": {"value_size": 40},
    "narrower_cache": {"cache_dtype": torch.float16},
    "wider_cache": {"cache_dtype": torch.float32},
    "heads_before_slots": {"heads_first": True},
    "slots_int64": {"slots_dtype": torch.int64},
}


def table(rot_dim: int, max_pos: int = 64) -> torch.Tensor:
    angles = torch.arange(max_pos)[:, None] * 100.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def empty_cache(kv_heads: int, size: int, dtype: torch.dtype, heads_first: bool) -> torch.Tensor:
    if heads_first:
        return torch.full((BLOCKS, kv_heads, PAGE, size), 7.0, dtype=dtype).transpose(1, 2)
    return torch.full((BLOCKS, PAGE, kv_heads, size), 7.0, dtype=dtype)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_rotates_and_writes(case: str, path: str, norm: bool, device: str, rng: torch.Generator) -> None:
    options = {"heads": 4, "kv_heads": 2, "size": 16, "slots": [5, 0, -1, 19, 6], "cache_dtype": None,
               "heads_first": False, "slots_dtype": torch.int32, **CASES[case]}  # fmt: skip
    heads, kv_heads, size = options["heads"], options["kv_heads"], options["size"]
    value_size, rot_dim = options.get("value_size", size), options.get("rot_dim", size)
    slots = torch.tensor(options["slots"], dtype=options["slots_dtype"])
    num_tokens = len(slots)
    positions = torch.randint(0, 64, (num_tokens,), generator=rng, dtype=torch.int32)
    positions[slots < 0] = 0
    cos_sin = table(rot_dim)
    for dtype in DTYPES:
        cache_dtype = options["cache_dtype"] or dtype
        weights = [torch.randn(size, generator=rng).to(dtype) for _ in range(2)] if norm else []
        # Slices of a fused projection, with something behind.
        widths = [heads * size, kv_heads * size, kv_heads * value_size, 8]
        qkv = torch.randn(num_tokens, sum(widths), generator=rng).to(dtype)
        caches = [empty_cache(kv_heads, width, cache_dtype, options["heads_first"]) for width in (size, value_size)]

        def views(fused: torch.Tensor, widths: list[int] = widths) -> list[torch.Tensor]:
            counts = (heads, kv_heads, kv_heads)
            parts = fused.split(widths, dim=1)
            return [
                part.view(num_tokens, count, width // count)
                for part, count, width in zip(parts, counts, widths, strict=False)
            ]

        expected, expected_caches = qkv.clone(), [cache.clone() for cache in caches]
        query, key, value = views(expected)
        if norm:
            qk_norm_rope_torch(query, key, positions, cos_sin, weights[0], weights[1], 1e-5)
        else:
            apply_rope_torch(query, key, positions, cos_sin)
        write_kv_torch(key, value, *expected_caches, slots)

        given = qkv.clone().to(device)
        given_caches = [cache.clone().to(device) for cache in caches]
        arguments = [*views(given), positions.to(device), cos_sin.to(device), *given_caches, slots.to(device)]
        if norm:
            arguments += [*(weight.to(device) for weight in weights), 1e-5]
        assert PATHS[path](*arguments) is None

        # One rounding apart where fp32 sums differ in their last bit.
        eps = max(torch.finfo(dtype).eps, torch.finfo(cache_dtype).eps)
        tolerance = {"rtol": 2e-6 if eps < 1e-6 else eps, "atol": 2e-6}
        torch.testing.assert_close(views(given.cpu())[0], query, **tolerance)
        torch.testing.assert_close(given_caches[0].cpu(), expected_caches[0], **tolerance)
        assert torch.equal(given_caches[1].cpu(), expected_caches[1])
        untouched = torch.ones(BLOCKS * PAGE, dtype=torch.bool)
        untouched[slots[slots >= 0].long()] = False
        for cache in given_caches:
            assert bool((cache.cpu().reshape(BLOCKS * PAGE, -1)[untouched] == 7.0).all()), "wrote elsewhere"
        behind = sum(widths[:2])
        assert torch.equal(given[:, behind:].cpu(), qkv[:, behind:])


@pytest.mark.parametrize("path", PATHS)
def test_rounds_to_the_model_dtype_first(path: str, device: str) -> None:
    """A wider cache holds what the two launches would have left there: a float16 number in float32."""
    query, key, value = torch.full((3, 2, 2, 8), 1.25, dtype=torch.float16, device=device)
    caches = torch.zeros(2, 1, 4, 2, 8, device=device)
    positions = torch.tensor([1, 2], dtype=torch.int32, device=device)
    slots = torch.tensor([3, 0], dtype=torch.int32, device=device)
    PATHS[path](query, key, value, positions, table(8).to(device), caches[0], caches[1], slots)
    assert torch.equal(caches[0], caches[0].half().float())
    assert torch.equal(caches[0, 0, [3, 0]], query.float())  # same heads, same angles


def test_pdl_is_for_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pdl.pdl_options(torch.empty(0), 1) == {"PDL": False}
    monkeypatch.setattr(pdl, "pdl_available", lambda device: True)
    assert pdl.pdl_options(torch.empty(0), pdl.MAX_ROWS) == {"PDL": True, "launch_pdl": True}
    assert pdl.pdl_options(torch.empty(0), pdl.MAX_ROWS + 1) == {"PDL": False}
    assert pdl.pdl_options(torch.empty(0)) == {"PDL": True, "launch_pdl": True}
    monkeypatch.undo()
    for cuda, capability, switch, expected in (
        ("13.0", (9, 0), None, True),
        ("13.0", (9, 0), "0", True),
        ("13.0", (9, 0), "1", False),
        ("13.0", (8, 0), None, False),
        ("13.0", (10, 0), None, False),
        (None, (9, 4), None, False),  # ROCm names its devices "cuda" as well
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.delenv("VSERVE_NO_PDL", raising=False)
        if switch is not None:
            monkeypatch.setenv("VSERVE_NO_PDL", switch)
        assert pdl.pdl_available.__wrapped__(torch.device("cuda", 0)) is expected
