"""Times the attention kernels on an NVIDIA GPU: python tools/kernels/bench_attention.py [--sweep] [--only decode].

Shape of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, page 16, bf16, shuffled pages. Decode is timed by
replaying a CUDA graph that calls the kernel for the caches of several layers in turn, from a cold L2, each time after
the rotation, as in a step: its programs begin while the kernel before still runs, and which one that is decides where
they go. What the rotations take alone is subtracted. --sweep tries other tiles and splits and prints the five best of
each shape.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from vserve.kernels.attention.attention_decode import decode_attention_triton, decode_tile
from vserve.kernels.attention.attention_parts import (
    DecodeWorkspace,
    PagedCache,
    RaggedBatch,
    Scoring,
    UniformBatch,
    choose_splits,
)
from vserve.kernels.attention.attention_prefill import prefill_attention_triton, prefill_tile
from vserve.kernels.attention.attention_prefill_hopper import prefill_attention_hopper
from vserve.kernels.attention.prefill_work import PrefillWork
from vserve.kernels.attention.rope_kv import rope_write_kv_triton

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
SCORING = Scoring(SIZE**-0.5)
DTYPE = torch.bfloat16
LAYERS = 8

DECODE_SHAPES = [(1, 8192), (1, 32768), (1, 256), (64, 1024), (64, 4096), (256, 1024), (256, 256)]  # requests, context
# requests, query tokens, context
PREFILL_SHAPES = [(1, 8192, 8192), (8, 1024, 1024), (1, 2048, 8192), (1, 960, 960), (1, 960, 7680)]

DECODE_SWEEP = {
    "block_n": [32, 64],
    "num_warps": [1, 2, 4],
    "num_stages": [2, 3, 4, 6],
    "num_splits": [1, 2, 4, 8, 16, 32, 64],
}
PREFILL_SWEEP = {"block_m": [64, 128], "block_n": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]}


def graph_microseconds(call: Callable[[], object], calls_inside: int) -> float:
    """Microseconds a call, from replays of one CUDA graph that holds `calls_inside` of them."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the other stream must not run ahead of what made its inputs
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=50, return_mode="median") * 1e3 / calls_inside


def microseconds(call: Callable[[], object]) -> float:
    return triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median") * 1e3


def settings(sweep: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def paged_caches(requests: int, context: int, layers: int, max_context: int = 0) -> list[PagedCache]:
    """One a layer, with a block table whose blocks are shuffled and which is wide enough for max_context."""
    pages = context // PAGE
    shape = (requests * pages + 1, PAGE, KV_HEADS, SIZE)
    keys = [torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(layers)]
    values = [torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(layers)]
    blocks = torch.randperm(requests * pages, device="cuda") + 1
    table = torch.zeros(requests, max(max_context, context) // PAGE, dtype=torch.int32, device="cuda")
    table[:, :pages] = blocks.view(requests, pages)
    return [PagedCache(*tensors, table) for tensors in zip(keys, values, strict=True)]


def decode_run(
    requests: int, context: int, max_context: int = 8192, caches: list[PagedCache] | None = None
) -> Callable[..., float]:
    """A function that times the kernel on such a batch, with whatever options of its launcher."""
    # A server's block table is as wide as its longest context, and the default split count follows that width.
    caches = caches or paged_caches(requests, context, LAYERS, max_context)
    query = torch.randn(requests, HEADS, SIZE, dtype=DTYPE, device="cuda")
    rows = torch.arange(requests, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    batch = UniformBatch(rows, lengths)
    out = torch.empty_like(query)
    new = torch.randn(2, requests, KV_HEADS, SIZE, dtype=DTYPE, device="cuda")
    positions = lengths - 1
    slots = caches[0].block_table[:, context // PAGE - 1] * PAGE + PAGE - 1
    angles = torch.rand(context, SIZE // 2, device="cuda")
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def run(**options: Any) -> float:
        def call(attend: bool) -> None:
            for cache in caches:
                rope_write_kv_triton(
                    query, new[0], new[1], positions, cos_sin, cache.keys, cache.values, slots,
                    key_scales=cache.key_scales, value_scales=cache.value_scales,
                )  # fmt: skip
                if attend:
                    decode_attention_triton(query, cache, batch, SCORING, out=out, **options)

        rotations = graph_microseconds(lambda: call(False), LAYERS)
        return graph_microseconds(lambda: call(True), LAYERS) - rotations

    return run


def bench_decode(requests: int, context: int, sweep: bool, max_context: int) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    num_bytes = 2 * requests * context * KV_HEADS * SIZE * DTYPE.itemsize
    run = decode_run(requests, context, max_context)
    workspace = DecodeWorkspace.create(requests, HEADS, SIZE, "cuda")

    def show(label: str, time: float) -> None:
        print(f"decode  {requests:4d} x {context:5d}  {time:8.1f} us  {num_bytes / time / 1e3:7.0f} GB/s  {label}")

    splits, min_tokens = choose_splits(requests, KV_HEADS, sms, max(max_context, context))
    show(f"{decode_tile(DTYPE, SIZE, requests)}, {splits} splits of at least {min_tokens}", run(workspace=workspace))
    if sweep:
        timed = []
        for options in settings(DECODE_SWEEP):
            splits = options["num_splits"]
            if splits == 1 or (splits * 64 <= context and requests * KV_HEADS * splits <= 64 * sms):
                timed.append((attempt(run, min_split_tokens=context // splits, **options), options))
        for time, options in sorted(timed, key=lambda pair: pair[0])[:5]:
            show(str(options), time)


def prefill_run(requests: int, query_len: int, context: int, cache: PagedCache | None = None) -> Callable[..., float]:
    """A function that times a kernel on such a batch, with whatever options of its launcher.

    The work table of the kernel for Hopper GPUs is made beforehand, as it is for all layers but the first.
    """
    cache = cache or paged_caches(requests, context, 1)[0]
    query = torch.randn(requests * query_len, HEADS, SIZE, dtype=DTYPE, device="cuda")
    rows = torch.arange(requests, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    start = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * query_len
    out = torch.empty_like(query)
    batch = RaggedBatch(rows, lengths, start, query_len)
    work = PrefillWork(batch)

    def run(kernel: Callable[..., object] = prefill_attention_triton, **options: Any) -> float:
        if kernel is prefill_attention_hopper:
            options["work"] = work

        def call() -> None:
            for _ in range(LAYERS):
                kernel(query, cache, batch, SCORING, out=out, **options)

        return graph_microseconds(call, LAYERS)

    return run


def bench_prefill(requests: int, query_len: int, context: int, sweep: bool) -> None:
    pairs = query_len * (context - query_len) + query_len * (query_len + 1) // 2
    flops = 4 * requests * HEADS * SIZE * pairs
    run = prefill_run(requests, query_len, context)
    on_hopper = torch.cuda.get_device_capability() == (9, 0)

    def show(label: str, time: float) -> None:
        shape = f"{requests:4d} x {query_len:5d} of {context:5d}"
        print(f"prefill {shape}  {time:8.1f} us  {flops / time / 1e6:6.0f} TFLOP/s  {label}")

    show(str(prefill_tile(DTYPE, SIZE, query_len * HEADS // KV_HEADS)), run())
    if on_hopper:
        show("warp-specialised", run(prefill_attention_hopper))
    if query_len == context:
        q, k, v = (torch.randn(requests, HEADS, context, SIZE, dtype=DTYPE, device="cuda") for _ in range(3))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            time = microseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCORING.scale))
        show("torch's flash attention, contiguous, no grouped heads", time)
    if sweep:
        timed = [(attempt(run, **options), options) for options in settings(PREFILL_SWEEP)]
        for time, options in sorted(timed, key=lambda pair: pair[0])[:5]:
            show(str(options), time)


def attempt(run: Callable[..., float], **options: Any) -> float:
    """The time, or infinity where the setting needs more shared memory than there is."""
    try:
        return run(**options)
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also try other tiles and splits and print the five best")
    parser.add_argument("--only", choices=["decode", "prefill"], help="time one kernel only")
    parser.add_argument("--max-context", type=int, default=8192, help="width of the decode block table in tokens")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_attention.py times CUDA kernels: run it on a machine with an NVIDIA GPU")
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, triton {triton.__version__}")
    if arguments.only != "prefill":
        for requests, context in DECODE_SHAPES:
            bench_decode(requests, context, arguments.sweep, arguments.max_context)
    if arguments.only != "decode":
        for requests, query_len, context in PREFILL_SHAPES:
            bench_prefill(requests, query_len, context, arguments.sweep)


if __name__ == "__main__":
    main()
