"""Times latent attention of prompts, absorbed and expanded: tools/kernels/bench_latent.py [--heads 16] [--sweep].

One layer of DeepSeek V3's sizes, from rotated queries to each head's values; a card of eight has 16 of its heads. The
absorbed way's products before and behind attention are counted in, as is the expansion. Where expansion is slower for
as many products as it spares, engine/cache/latent_prompts.py is to ask for more. --sweep: other tiles of its attention.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from vserve.kernels.attention import latent_prompts
from vserve.kernels.attention.attention import prefill_attention
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring
from vserve.kernels.attention.attention_prefill import PrefillTile
from vserve.kernels.attention.latent_prompts import ExpandedPrompts, LatentSizes, expanded_attention

RANK, ROPE, NOPE, VALUE, PAGE = 512, 64, 128, 128, 16
SCORING = Scoring((NOPE + ROPE) ** -0.5)
WORKSPACE = 1 << 28  # elements
# requests, query tokens, context
SHAPES = [(1, 256, 256), (1, 1024, 1024), (4, 1024, 1024), (1, 2048, 2048), (1, 8192, 8192), (1, 256, 8192),
          (1, 1024, 8192), (1, 1024, 32768), (1, 8192, 65536)]  # fmt: skip
TILES = {"block_m": [64, 128], "block_n": [32, 64, 128], "warps": [4, 8], "stages": [2, 3]}


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        return float(triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median"))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def bench(requests: int, query_len: int, context: int, heads: int, device: str, sweep: bool) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    random = partial(torch.randn, device=device, dtype=dtype)
    pages, tokens = context // PAGE, requests * query_len
    latents = random(requests * pages, PAGE, 1, RANK + ROPE)
    table = torch.randperm(requests * pages, device=device).int().view(requests, pages)
    cache = PagedCache(latents, latents[..., :RANK], table)
    rows = torch.arange(requests, dtype=torch.int32, device=device)
    start = torch.arange(requests + 1, dtype=torch.int32, device=device) * query_len
    batch = RaggedBatch(rows, torch.full_like(rows, context), start, query_len)
    query, out = random(tokens, heads, NOPE + ROPE), random(tokens, heads, VALUE)
    keys, values = random(heads, NOPE, RANK) / RANK**0.5, random(heads, RANK, VALUE) / RANK**0.5
    sizes = LatentSizes(RANK, ROPE, NOPE, VALUE, heads)
    numbers = torch.empty(sizes.workspace_elements(requests * context, WORKSPACE, context), dtype=dtype, device=device)
    prompts = ExpandedPrompts(batch, list(range(requests)), [context] * requests, numbers)

    def absorbed() -> Tensor:
        long = query.new_empty(tokens, heads, RANK + ROPE)
        torch.bmm(query[..., :NOPE].transpose(0, 1), keys, out=long[..., :RANK].transpose(0, 1))
        long[..., RANK:] = query[..., NOPE:]
        attended = prefill_attention(long, cache, batch, SCORING)
        found = query.new_empty(tokens, heads, VALUE)
        torch.bmm(attended.transpose(0, 1), values, out=found.transpose(0, 1))
        return found

    def expanded() -> None:
        expanded_attention(query, cache, prompts, keys, values, SCORING, out)

    expanded()
    error = ((out - absorbed()).norm() / out.norm()).item()
    first, second = milliseconds(absorbed, device), milliseconds(expanded, device)
    saved = 2 * heads * sizes.saved([query_len] * requests, [context] * requests)
    print(
        f"{requests} x {query_len:5d} of {context:5d}  absorbed {first:9.3f} ms  expanded {second:9.3f} ms  "
        f"{first / second:5.2f} times as fast  {saved / 1e9:8.1f} GFLOP less  error {error:.1e}"
    )
    usual = latent_prompts.expanded_tile
    for options in itertools.product(*TILES.values()) if sweep else ():
        tile = PrefillTile(*options)
        latent_prompts.expanded_tile = lambda *_, tile=tile: tile  # type: ignore[assignment]
        try:
            print(f"    {tile}  {milliseconds(expanded, device):9.3f} ms")
        except triton.runtime.errors.OutOfResources:
            continue
        finally:
            latent_prompts.expanded_tile = usual


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the two shortest prompts alone")
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    with torch.inference_mode():
        for shape in SHAPES if asked.device == "cuda" else SHAPES[:2]:
            bench(*shape, asked.heads, asked.device, asked.sweep and asked.device == "cuda")
