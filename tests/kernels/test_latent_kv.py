"""Latent attention's query rotation and cache write: against the formula, pair by pair, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.attention.latent_kv import write_latent, write_latent_torch, write_latent_triton

PATHS: dict[str, Callable[..., None]] = {
    "torch": write_latent_torch,
    "triton": write_latent_triton,
    "public": write_latent,
}
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
PAGE, BLOCKS, EPS = 4, 5, 1e-2

CASES: dict[str, dict[str, Any]] = {
    "deepseek": {"heads": 16, "rank": 512, "dim": 64},
    "several_groups": {"heads": 40},
    "heads_not_power_of_two": {"heads": 5},
    "one_head": {"heads": 1},
    "sizes_not_powers_of_two": {"rank": 24, "dim": 12},
    "one_token": {"slots": [7]},
    "one_padding_token": {"slots": [-1]},
    "only_padding": {"slots": [-1, -1, -1]},
    "no_tokens": {"slots": []},
    "narrower_cache": {"cache_dtype": torch.float16},
    "wider_cache": {"cache_dtype": torch.float32},
    "slots_int64": {"slots_dtype": torch.int64},
}


def rotated(x: Tensor, position: int, frequencies: Tensor, interleaved: bool) -> Tensor:
    """[D] in float64 → first elements of all pairs, then the second ones."""
    first, second = (x[::2], x[1::2]) if interleaved else x.chunk(2)
    turned = torch.complex(first, second) * torch.exp(1j * position * frequencies)
    return torch.cat((turned.real, turned.imag))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_rotates_norms_and_writes(case: str, path: str, interleaved: bool, device: str, rng: torch.Generator) -> None:
    options = {"heads": 4, "rank": 32, "dim": 8, "slots": [5, 0, -1, 19, 6], "cache_dtype": None,
               "slots_dtype": torch.int32, **CASES[case]}  # fmt: skip
    device = "cpu" if path == "torch" else device
    heads, rank, dim, slots = (options[name] for name in ("heads", "rank", "dim", "slots"))
    num_tokens, frequencies = len(slots), 10.0 ** -torch.arange(dim // 2, dtype=torch.float64)
    angles = torch.arange(64)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device)
    positions = torch.randint(0, 64, (num_tokens,), generator=rng)
    for dtype in DTYPES if path != "public" else DTYPES[:1]:
        head = dim + 6  # what is rotated stands behind the rest of a head
        queries = torch.randn(num_tokens, heads, head, generator=rng).to(device, dtype)
        latent = (torch.randn(num_tokens, 3 + rank + dim, generator=rng) / 10).to(device, dtype)[:, 3:]
        weight = torch.randn(rank, generator=rng).to(device, dtype)
        query = torch.full((num_tokens, heads, rank + dim), 5.0, dtype=dtype, device=device)
        cache_dtype = options["cache_dtype"] or dtype
        cache = torch.full((BLOCKS, PAGE, 1, rank + dim), 7.0, dtype=cache_dtype, device=device)
        untouched, source = cache.clone(), queries.clone()
        PATHS[path](
            queries[..., 6:], query[..., rank:], latent, positions.to(device, torch.int32), table, cache,
            torch.tensor(slots, dtype=options["slots_dtype"], device=device), weight, EPS, interleaved,
        )  # fmt: skip
        assert torch.equal(queries, source) and (query[..., :rank] == 5.0).all(), "what is not its to write"
        expected = untouched.double().cpu()
        exact, gain = latent.double().cpu(), weight.double().cpu()
        for token, slot in enumerate(slots):
            position = int(positions[token])
            for index in range(heads):
                wanted = rotated(source[token, index, 6:].double().cpu(), position, frequencies, interleaved)
                torch.testing.assert_close(
                    query[token, index, rank:].double().cpu(), wanted, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype]
                )
            if slot >= 0:
                compressed = exact[token, :rank]
                normed = compressed / (compressed.square().mean() + EPS).sqrt() * gain
                key = rotated(exact[token, rank:], position, frequencies, interleaved)
                expected[slot // PAGE, slot % PAGE, 0] = torch.cat((normed, key))
        coarser = max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
        torch.testing.assert_close(cache.double().cpu(), expected, rtol=coarser, atol=20 * coarser)
        unwritten = torch.ones(BLOCKS * PAGE, dtype=torch.bool)
        unwritten[[slot for slot in slots if slot >= 0]] = False
        assert (cache.flatten(0, 1)[unwritten.to(device)] == 7.0).all(), "wrote where nothing belongs"


def test_padding_writes_nothing_and_reads_no_slot(device: str) -> None:
    """Padding's latent may be anything: NaN does not travel."""
    latent = torch.full((2, 24), float("nan"), device=device)
    latent[0] = 1.0
    cache = torch.zeros(2, PAGE, 1, 24, device=device)
    query = torch.zeros(2, 1, 24, device=device)
    table = torch.cat((torch.ones(4, 4), torch.zeros(4, 4)), dim=1).to(device)
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    slots = torch.tensor([4, -1], dtype=torch.int32, device=device)
    rotary, weight = torch.ones(2, 1, 8, device=device), torch.ones(16, device=device)
    for write in (write_latent_torch, write_latent_triton):
        write(rotary, query[..., 16:], latent, zeros, table, cache, slots, weight, 1e-6, True)
        assert cache.isfinite().all() and cache[1, 0].ne(0).all()


_COMPILE = """
from vserve.kernels.attention.latent_kv import write_latent_triton
JITFunction.__getitem__ = warm_up_instead
for tokens in (1, 2, 16, 300):
    x = torch.empty(tokens, 128, 192, dtype=torch.bfloat16)
    ints = torch.empty(tokens, dtype=torch.int32)
    write_latent_triton(
        x[..., 128:], torch.empty(tokens, 128, 576, dtype=torch.bfloat16)[..., 512:],
        torch.empty(tokens, 1536 + 576, dtype=torch.bfloat16)[:, 1536:], ints, torch.empty(4096, 64),
        torch.empty(40, 16, 1, 576, dtype=torch.bfloat16), ints, torch.empty(512, dtype=torch.bfloat16), 1e-6, True,
    )
print(json.dumps([resources(kernel) for _, kernel in kernels.values()]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for this GPU")
def test_compiles_for_hopper(run_for_hopper: Callable[..., Any]) -> None:
    """Once for all batch sizes, in few registers and without spilling."""
    (found,) = run_for_hopper(_COMPILE)
    assert found["local"] == 0 and found["reg"] <= 64
