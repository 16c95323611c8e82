"""Latent attention of prompts, expanded: the same as absorbed, in whatever pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.attention import latent_prompts
from vserve.kernels.attention.attention import prefill_attention_torch
from vserve.kernels.attention.attention_parts import PagedCache
from vserve.kernels.attention.attention_prefill import prefill_attention_triton, prefill_tile
from vserve.kernels.attention.latent_prompts import (
    ExpandedPrompts,
    LatentSizes,
    expanded_attention,
    expanded_tile,
    split,
)

SIZES = LatentSizes(rank=32, rope=8, nope=16, value=16, heads=5)
ROW, HEAD, PAGE = SIZES.row, SIZES.head, 16

CASES: dict[str, dict[str, Any]] = {
    "a prompt": {"lengths": [70], "query_lens": [70]},
    "chunks behind what is cached": {"lengths": [70, 33, 16], "query_lens": [20, 1, 16]},
    "decodes before, padding behind": {"lengths": [40, 9], "query_lens": [12, 9], "before": 3, "behind": 2},
    "some heads at a time": {
        "lengths": [70, 20], "query_lens": [70, 3], "capacity": 80 * (ROW + 2 * HEAD), "pieces": 2,
    },
    "one head at a time": {"lengths": [70], "query_lens": [30], "capacity": 80 * (ROW + HEAD)},
    "one request at a time": {
        "lengths": [33, 40, 47], "query_lens": [33, 4, 20], "capacity": 48 * (ROW + 5 * HEAD), "pieces": 3,
    },
    "two together, one alone": {
        "lengths": [16, 17, 70], "query_lens": [16, 5, 70], "capacity": 80 * (ROW + 5 * HEAD), "pieces": 2,
    },
    "more requests than a piece has": {"lengths": [5] * 20, "query_lens": [4] * 20, "pieces": 2},
    "contexts that may be longer": {"lengths": [30, 18], "query_lens": [11, 18], "longer": 9},
    "a request without tokens": {"lengths": [0, 20], "query_lens": [0, 20]},
    "window": {"lengths": [70, 20], "query_lens": [33, 20], "window": 24},
    "no tail": {"lengths": [40], "query_lens": [20], "sizes": replace(SIZES, nope=24, value=32)},
    "value not a power of two": {"lengths": [40], "query_lens": [20], "sizes": replace(SIZES, value=12)},
}  # fmt: skip


@pytest.fixture(scope="module")
def paged(load_module: Callable[[Path], Any]) -> Any:
    """What makes batches for all attention kernels."""
    return load_module(Path(__file__).with_name("test_attention.py"))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_expanded_is_absorbed(
    case: str, implementation: str, rng: torch.Generator, device: str, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "torch":
        device = "cpu"
    elif device == "cpu":  # its kernel, in the interpreter

        def attend(query, cache, prompts, scoring, out):
            prefill_attention_triton(
                query, cache, prompts, scoring, out=out, block_m=16, block_n=16, num_warps=4, num_stages=1,
                any_heads=True,
            )  # fmt: skip

        monkeypatch.setattr(latent_prompts, "prefill_attention_torch", attend)
    options = {"before": 0, "behind": 0, "window": 0, **CASES[case]}
    sizes, pieces = options.pop("sizes", SIZES), options.pop("pieces", 1)
    longer, capacity = options.pop("longer", 0), options.pop("capacity", 1 << 20)
    lengths, query_lens, before, behind = (options[name] for name in ("lengths", "query_lens", "before", "behind"))
    batch = paged.make_batch(rng, device, torch.float32, kv_heads=1, size=sizes.row, value_size=sizes.rank, **options)
    cache = PagedCache(batch.cache.keys, batch.cache.keys[..., : sizes.rank], batch.cache.block_table)
    num_tokens = before + sum(query_lens) + behind
    query = torch.randn(num_tokens, sizes.heads, sizes.nope + sizes.rope, generator=rng).to(device)
    keys = (torch.randn(sizes.heads, sizes.nope, sizes.rank, generator=rng) / 4).to(device)
    values = torch.randn(sizes.heads, sizes.rank, sizes.value, generator=rng).to(device)

    prompts = ExpandedPrompts(
        batch.requests, batch.requests.rows.tolist(), [length + longer for length in lengths],
        torch.full((capacity,), float("nan"), device=device),
    )  # fmt: skip
    out = torch.full((num_tokens, sizes.heads, sizes.value), float("nan"), device=device)
    expanded_attention(query, cache, prompts, keys, values, batch.scoring, out)
    assert len(prompts.pieces(sizes, PAGE)) == pieces

    plain, rotated = query.double().cpu().split([sizes.nope, sizes.rope], dim=2)
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", plain, keys.double().cpu()), rotated), dim=2)
    on_host = PagedCache(*(x.double().cpu() for x in (cache.keys, cache.values)), cache.block_table.cpu())
    requests = batch.requests
    requests = replace(
        requests, rows=requests.rows.cpu(), seq_lens=requests.seq_lens.cpu(), query_start=requests.query_start.cpu()
    )
    attended = prefill_attention_torch(absorbed, on_host, requests, batch.scoring)
    expected = torch.einsum("thr,hrv->thv", attended, values.double().cpu())
    first, last = before, num_tokens - behind
    torch.testing.assert_close(out[first:last].double().cpu(), expected[first:last], rtol=1e-4, atol=2e-5)
    assert out[:first].isnan().all() and out[last:].isnan().all(), "wrote rows that belong to no prompt"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "sizes",
    [LatentSizes(512, 64, 128, 128, 16), LatentSizes(512, 64, 192, 256, 20), LatentSizes(256, 32, 64, 64, 40)],
    ids=["deepseek", "glm", "minicpm"],
)
def test_in_the_sizes_that_it_serves_in(
    sizes: LatentSizes, dtype: torch.dtype, rng: torch.Generator, paged: Any
) -> None:
    """Against the twin in float64, from the same latents: long chunks behind a context, half of the heads at a time."""
    batch = paged.make_batch(
        rng, "cuda", dtype, [1500, 900, 40], [700, 900, 1], kv_heads=1, size=sizes.row, value_size=sizes.rank, before=5
    )
    cache = PagedCache(batch.cache.keys, batch.cache.keys[..., : sizes.rank], batch.cache.block_table)
    query = torch.randn(1606, sizes.heads, sizes.nope + sizes.rope, generator=rng).to("cuda", dtype)
    keys = (torch.randn(sizes.heads, sizes.nope, sizes.rank, generator=rng) / sizes.rank**0.5).to("cuda", dtype)
    values = (torch.randn(sizes.heads, sizes.rank, sizes.value, generator=rng) / sizes.rank**0.5).to("cuda", dtype)
    scoring = replace(batch.scoring, scale=(sizes.nope + sizes.rope) ** -0.5)

    def result(*tensors: torch.Tensor) -> torch.Tensor:
        query, latents, keys, values = tensors
        paged = PagedCache(latents, latents[..., : sizes.rank], batch.cache.block_table)
        numbers = query.new_full((1536 * (sizes.row + sizes.heads // 2 * sizes.head),), float("nan"))
        prompts = ExpandedPrompts(batch.requests, batch.requests.rows.tolist(), [1500, 900, 40], numbers)
        out = query.new_full((1606, sizes.heads, sizes.value), float("nan"))
        with pytest.MonkeyPatch.context() as patch:
            if query.dtype == torch.float64:
                patch.setattr(
                    latent_prompts, "_attend", lambda *args: prefill_attention_torch(*args[:4], out=args[4])
                )  # fmt: skip
            expanded_attention(query, paged, prompts, keys, values, scoring, out)
        assert out[:5].isnan().all()
        return out[5:]

    given = query, cache.keys, keys, values
    expected = result(*(tensor.double() for tensor in given))
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(result(*given).double(), expected, rtol=tolerance, atol=tolerance)


def test_pieces_are_as_large_as_fits() -> None:
    """Every request and head once; no more than the workspace holds, and never a head less than there is room for."""
    for capacity in range(6 * PAGE * (ROW + HEAD), 40 * PAGE * (ROW + 5 * HEAD), 997):
        pages = [1, 3, 2, 6, 1, 1, 0, 4, 6, 6]
        spans = list(split(pages, PAGE, SIZES, capacity))
        assert [first for first, _, _ in spans] == [0, *(last for _, last, _ in spans[:-1])]
        assert spans[-1][1] == len(pages)
        for first, last, heads in spans:
            tokens = sum(pages[first:last]) * PAGE
            assert 0 < heads <= SIZES.heads and tokens * (ROW + heads * HEAD) <= capacity
            assert heads == SIZES.heads or last == first + 1, "heads are divided only where one request is too long"
            turns = -(-SIZES.heads // heads)
            assert turns == 1 or tokens * (ROW + -(-SIZES.heads // (turns - 1)) * HEAD) > capacity


def test_the_workspace_holds_a_head_of_the_longest_context() -> None:
    assert SIZES.workspace_elements(640, 1 << 30, 320) == 640 * (ROW + 5 * HEAD)
    assert SIZES.workspace_elements(640, 10000, 32) == 10000
    assert SIZES.workspace_elements(640, 10000, 320) == 320 * (ROW + HEAD)
    assert list(split([20], PAGE, SIZES, 320 * (ROW + HEAD))) == [(0, 1, 1)]


def test_products_that_expansion_spares() -> None:
    """Counted one by one, of DeepSeek V3's sizes: from 171 query tokens on it pays, however long the context is."""
    sizes = LatentSizes(512, 64, 128, 128, 128)
    for query_len, context in ((3, 3), (5, 9), (170, 90_000), (172, 90_000)):
        pairs = sum(context - query_len + place + 1 for place in range(query_len))
        absorbed = query_len * (128 * 512 + 512 * 128) + pairs * (576 + 512)
        expanded = context * 512 * (128 + 128) + pairs * (192 + 128)
        assert sizes.saved([query_len], [context]) == absorbed - expanded
    assert sizes.saved([170], [90_000]) < 0 < sizes.saved([172], [90_000])
    assert sizes.saved([3, 5], [3, 9]) == sizes.saved([3], [3]) + sizes.saved([5], [9])


def test_only_keys_beyond_128_have_a_tile_of_their_own() -> None:
    """DeepSeek's, which share a row of the table with those of 256; MiniCPM3's of 96 are as those of 128."""
    for dtype, size, usual in ((torch.bfloat16, 192, False), (torch.bfloat16, 96, True), (torch.float32, 192, True)):
        assert (expanded_tile(dtype, size) == prefill_tile(dtype, size, 1 << 30)) is usual


_COMPILE = """
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring
from vserve.kernels.attention.attention_prefill import prefill_attention_triton
from vserve.kernels.attention.latent_prompts import expanded_tile
JITFunction.__getitem__ = warm_up_instead
size, value_size = int(sys.argv[1]), int(sys.argv[2])
for heads in (1, 3, 16):
    query = torch.empty(600, 16, size, dtype=torch.bfloat16)[:, :heads]
    cache = PagedCache(
        torch.empty(40, 16, heads, size, dtype=torch.bfloat16),
        torch.empty(40, 16, heads, value_size, dtype=torch.bfloat16),
        torch.zeros(80, dtype=torch.int32).as_strided((40, 40), (1, 1)),
    )
    ints = torch.zeros(heads + 1, dtype=torch.int32)
    tile = expanded_tile(query.dtype, size)
    prefill_attention_triton(
        query, cache, RaggedBatch(ints[:heads], ints[:heads], ints, 99 * heads), Scoring(0.1), block_m=tile.block_m,
        block_n=tile.block_n, num_warps=tile.warps, num_stages=tile.stages, any_heads=True,
    )
print(json.dumps([
    {**resources(kernel), "shared": kernel.metadata.shared, "wgmma": "wgmma" in kernel.asm["ptx"]}
    for _, kernel in kernels.values()
]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    "sizes",
    ["192 128", pytest.param("256 256", marks=pytest.mark.slow), pytest.param("96 64", marks=pytest.mark.slow)],
)
def test_compiles_for_hopper(sizes: str, run_for_hopper: Callable[..., Any]) -> None:
    """Keys and values of DeepSeek, GLM-4.7-Flash and MiniCPM3: once for any number of heads, without spilling."""
    (found,) = run_for_hopper(_COMPILE, *sizes.split())
    assert found["local"] == found["stack"] == 0 and found["wgmma"] and found["shared"] <= 227 * 1024
