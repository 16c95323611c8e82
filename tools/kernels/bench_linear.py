"""Times small_linear against cuBLAS on an NVIDIA GPU: python tools/kernels/bench_linear.py [--sweep] [--shapes NxK …].

The weights of Llama-3.1-8B and Qwen2.5-7B unless others are named, bf16. A figure is µs a product, from replays of one
CUDA graph with the products of eight different weights, so that none is left in the L2 cache. `*`: the model uses
small_linear there. --sweep tries other tiles and prints the three best of each case.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from vserve.kernels.linear.linear import MAX_SPLIT_N, Tile, prepare, small_linear_rows, small_linear_triton

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = 8


def graph_microseconds(product: Callable[[Tensor], Tensor], weights: Tensor) -> float:
    def call() -> None:
        for weight in weights:
            product(weight)

    torch.cuda.synchronize()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median") * 1e3 / len(weights)


def tiles(m: int, n: int, k: int) -> Iterator[Tile]:
    block_m = max(16, triton.next_power_of_2(m))
    if m == 1:
        for block_n, block_k, warps, stages in itertools.product((4, 8, 16), (512, 1024), (4, 8), (1, 3)):
            if block_n * block_k <= 16384 and k % block_k == 0:
                yield Tile(block_n, block_k, warps, stages)
    for block_n, block_k, stages, splits, prefetch in itertools.product(
        (64, 128), (128, 256), (3, 4, 5), (1, 2, 4), (0, 4, 8, 16)
    ):
        shared = (block_n + block_m) * block_k * 2 * stages
        programs = triton.cdiv(n, block_n) * splits
        # With one row, a tile without splits is one of the other kernel.
        if shared > 227 * 1024 or k % (splits * block_k) or not 100 <= programs <= 1200 or (m == 1 and splits == 1):
            continue
        if (splits > 1 and n > MAX_SPLIT_N) or (prefetch > 0 and (prefetch * block_k > k // splits)):
            continue
        yield Tile(block_n, block_k, 4, stages, splits, prefetch)


def line(name: str, m: int, label: str, us: float, size: int, baseline: float) -> None:
    print(f"{name:12s} M={m:3d} {label:60s} {us:7.1f} us {size / us / 1e3:6.0f} GB/s {baseline / us:5.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", nargs="*", metavar="NxK", help="instead of the two models' weights")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS, metavar="M")
    arguments = parser.parse_args()
    shapes = SHAPES
    if arguments.shapes:
        shapes = {shape: (int(shape.split("x")[0]), int(shape.split("x")[1])) for shape in arguments.shapes}
    device = torch.device("cuda", torch.cuda.current_device())
    prepare(device)
    for name, (n, k) in shapes.items():
        weights = torch.empty(LAYERS, n, k, device=device, dtype=torch.bfloat16).normal_(std=0.02)
        for m in arguments.rows:
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            size = 2 * (n * k + m * k + m * n)
            baseline = graph_microseconds(lambda weight, x=x: linear(x, weight), weights)
            line(name, m, "cuBLAS", baseline, size, baseline)
            us = graph_microseconds(lambda weight, x=x: small_linear_triton(x, weight), weights)
            used = "*" if m <= small_linear_rows(n, k, x.dtype) else ""
            line(name, m, f"small_linear{used}", us, size, baseline)
            if not arguments.sweep:
                continue
            results = []
            for tile in tiles(m, n, k):
                try:
                    us = graph_microseconds(
                        lambda weight, x=x, tile=tile: small_linear_triton(x, weight, tile=tile), weights
                    )
                except triton.runtime.errors.OutOfResources:
                    continue
                results.append((us, tile))
            for us, tile in sorted(results)[:3]:
                line(name, m, str(tuple(tile)), us, size, baseline)
        del weights


if __name__ == "__main__":
    main()
