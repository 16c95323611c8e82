"""How pages lie and what they are made of, timed on an NVIDIA GPU: python tools/kernels/bench_kv_layout.py [--sweep].

The shapes and the ways of bench_attention.py. Layouts: each layer's keys and values apart, as they are allocated (the
baseline of the percentages), and page-major, where a block's pages of all layers are neighbours; both of bf16 and of 8
bits, the latter with a scale a head or a scale a token and head. Variants take turns, and of each the median of the
rounds counts. --sweep: also other tiles of decode attention over codes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import bench_attention
import torch
from bench_attention import KV_HEADS, LAYERS, PAGE, SIZE, attempt, decode_run, prefill_run, settings

from vserve.kernels.attention.attention_decode import decode_tile
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring
from vserve.kernels.attention.attention_prefill import prefill_attention_triton
from vserve.kernels.attention.attention_prefill_hopper import prefill_attention_hopper
from vserve.kernels.attention.kv_fp8 import fixed_scales
from vserve.kernels.attention.kv_unpack import PromptPages, UnpackedPrompts

ROUNDS = 3
DECODE_SHAPES = [(1, 8192), (64, 1024), (64, 4096), (256, 256), (256, 1024)]
PREFILL_SHAPES = [(1, 8192, 8192), (8, 1024, 1024), (1, 960, 7680)]
CODE_SWEEP = {"block_n": [32, 64, 128], "num_warps": [2, 4], "num_stages": [3, 4, 6]}


def caches(
    requests: int, context: int, layers: int, dtype: torch.dtype, page_major: bool = False, token_scales: bool = False
) -> list[PagedCache]:
    """One a layer; as paged_caches of bench_attention.py."""
    pages = context // PAGE
    blocks = requests * pages + 1
    if page_major:
        memory = torch.empty(blocks, layers, 2, PAGE, KV_HEADS, SIZE, dtype=dtype, device="cuda")
        tensors = [(memory[:, layer, 0], memory[:, layer, 1]) for layer in range(layers)]
    else:
        tensors = [
            (
                torch.empty(blocks, PAGE, KV_HEADS, SIZE, dtype=dtype, device="cuda"),
                torch.empty(blocks, PAGE, KV_HEADS, SIZE, dtype=dtype, device="cuda"),
            )
            for _ in range(layers)
        ]
    for pair in tensors:
        for numbers in pair:
            for start in range(0, blocks, 4096):  # not all at once in fp32
                part = numbers[start : start + 4096]
                part.copy_(torch.randn(part.shape, device="cuda"))
    table = torch.zeros(requests, max(8192, context) // PAGE, dtype=torch.int32, device="cuda")
    table[:, :pages] = (torch.randperm(blocks - 1, device="cuda") + 1).view(requests, pages)
    if dtype.itemsize > 1:
        return [PagedCache(*pair, table) for pair in tensors]
    if token_scales:
        scales = [torch.full((2, blocks, PAGE, KV_HEADS), 1.0, device="cuda") for _ in range(layers)]
        return [PagedCache(*pair, table, *both) for pair, both in zip(tensors, scales, strict=True)]
    one = fixed_scales(torch.ones(KV_HEADS, device="cuda"), blocks, PAGE)
    return [PagedCache(*pair, table, one, one) for pair in tensors]


KINDS = {
    "bf16": {"dtype": torch.bfloat16},
    "bf16, page-major": {"dtype": torch.bfloat16, "page_major": True},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "fp8, page-major": {"dtype": torch.float8_e4m3fn, "page_major": True},
    "fp8, scales of tokens": {"dtype": torch.float8_e4m3fn, "token_scales": True},
    "fp8 e5m2": {"dtype": torch.float8_e5m2},
}


def show(title: str, runs: dict[str, Callable[[], float]]) -> None:
    """All in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(run())
    middle = {name: statistics.median(found) for name, found in times.items()}
    first = next(iter(middle.values()))
    for name, found in middle.items():
        spread = (max(times[name]) - min(times[name])) / found
        print(f"{title}  {name:32s} {found:9.1f} us  {100 * (found / first - 1):+6.1f} %  (rounds differ by "
              f"{100 * spread:.1f} %)", flush=True)  # fmt: skip


def bench_decode(requests: int, context: int, sweep: bool) -> None:
    runs = {}
    for name, kind in KINDS.items():
        runs[name] = decode_run(requests, context, caches=caches(requests, context, LAYERS, **kind))
    show(f"decode {requests:4d} x {context:5d}", runs)
    if sweep:
        timed = [(attempt(runs["fp8"], **options), str(options)) for options in settings(CODE_SWEEP)]
        timed += [(attempt(runs["fp8, scales of tokens"], **options), f"{options}, scales of tokens")
                  for options in settings(CODE_SWEEP)]  # fmt: skip
        print("  now:", decode_tile(torch.float8_e4m3fn, SIZE, requests))
        for found, label in sorted(timed)[:8]:
            print(f"  {found:9.1f} us  {label}", flush=True)


def unpacking(context: int, attend: bool) -> Callable[..., object]:
    """The Hopper kernel behind the unpacking of codes, as one kernel of bench_attention.py; or the latter alone."""
    state: list[UnpackedPrompts] = []

    def kernel(query: torch.Tensor, cache: PagedCache, batch: RaggedBatch, scoring: Scoring, out: torch.Tensor) -> None:
        if not state:
            pages = PromptPages.create(len(batch.rows) * context, PAGE, 2 * KV_HEADS * SIZE, query.dtype, query.device)
            state.append(UnpackedPrompts(batch, pages, context // PAGE))
            state[0].work.table(query.shape[1] // KV_HEADS, len(query))  # made once a step, not once a layer
        unpacked = state[0]
        numbers = unpacked.unpack(cache)
        if attend:
            prefill_attention_hopper(query, numbers, unpacked.inside, scoring, work=unpacked.work, out=out)

    return kernel


def bench_prefill(requests: int, query_len: int, context: int) -> None:
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    runs: dict[str, Callable[[], float]] = {}
    for name, kind in KINDS.items():
        (cache,) = caches(requests, context, 1, **kind)
        if kind.get("page_major"):  # its layers are far apart, as if there were many
            cache = caches(requests, context, LAYERS, **kind)[LAYERS // 2]
        run = prefill_run(requests, query_len, context, cache)
        if kind["dtype"] is torch.bfloat16:
            if on_hopper:
                runs[name] = lambda run=run: run(prefill_attention_hopper)
            runs[f"{name}, Triton"] = lambda run=run: run(prefill_attention_triton)
            continue
        if on_hopper:
            runs[f"{name}, unpacked"] = lambda run=run: run(unpacking(context, True))
            runs[f"{name}, unpacking alone"] = lambda run=run: run(unpacking(context, False))
        runs[f"{name}, Triton"] = lambda run=run: run(prefill_attention_triton)
    show(f"prefill {requests:3d} x {query_len:5d} of {context:5d}", runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also other tiles of decode attention over codes")
    parser.add_argument("--only", choices=["decode", "prefill"], help="time one of both")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kv_layout.py times CUDA kernels: run it on a machine with an NVIDIA GPU")
    started = time.monotonic()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, {bench_attention.DTYPE}, heads 32/8 x {SIZE}")
    if arguments.only != "prefill":
        for requests, context in DECODE_SHAPES:
            bench_decode(requests, context, arguments.sweep)
    if arguments.only != "decode":
        for requests, query_len, context in PREFILL_SHAPES:
            bench_prefill(requests, query_len, context)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
