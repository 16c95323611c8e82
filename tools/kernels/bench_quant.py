"""Times the products of quantised weights against cuBLAS in bf16 on an NVIDIA GPU: python tools/kernels/bench_quant.py

The weights of Llama-3.1-8B; a figure is µs a product, from replays of one CUDA graph with the products of several
different weights, so that none is left in the L2 cache. Each kernel is tried with a few tiles, and the best of them is
printed, as the tables in configs/tiles have it. At the end: µs a layer, the four products and what quantises their
inputs. Processes of their own compile all variants first, side by side. --quick: a tile each. --check: fewer shapes and
rows, for a look at what fails.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from vserve.kernels.linear import dequantize, fp8_linear, fp8_rows
from vserve.kernels.linear import linear as few
from vserve.kernels.linear.fp8_linear import Fp8Tile, fp8_linear_triton, fp8_product, fp8_values, scaled
from vserve.kernels.linear.planes import BITS, Packed, pack, value_of
from vserve.kernels.linear.quant_linear import QuantTile, quant_linear_triton

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096)
# name → kind, group, shifts
LAYOUTS = {
    "int4 G=128": ("int4", 128, False),
    "int4 G=32 zeros": ("int4", 32, True),
    "nf4 G=64": ("table", 64, False),
    "int8 rows": ("int8", 0, False),
    "fp8 rows": ("e4m3", 0, False),
    "fp8 blocks": ("e4m3", 128, False),
}
MAIN = ("int4 G=128", "fp8 rows", "fp8 blocks")  # which are tried with all tiles
L2 = 60 << 20  # bytes, and more
Results = dict[tuple[str, str, int], float]
INF = float("inf")


def random_matrix(kind: str, n: int, k: int, group: int, shifts: bool, device: torch.device) -> Packed:
    codes = torch.randint(0, 1 << BITS[kind], (n, k), device=device, dtype=torch.uint8)
    table = tuple(torch.linspace(-1, 1, 16).tolist()) if kind == "table" else ()
    values = value_of(kind, table, device)
    codes[~values.isfinite()[codes.int()]] = 0
    size = float(values[values.isfinite()].std())
    dtype = torch.float32 if kind == "e4m3" else torch.float16
    scales = torch.full((n, k // group if group else 1), 0.02 / size, device=device, dtype=dtype)
    return pack(codes, scales, kind, group, scales if shifts else None, table)


def graph_microseconds(calls: list[Callable[[], Any]]) -> float:
    def run() -> None:
        for call in calls:
            call()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    repeats = max(2, min(20, int(4 / max(begin.elapsed_time(end), 0.01))))
    times = []
    for _ in range(3):
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return sorted(times)[1] * 1e3 / len(calls)


def few_tiles(m: int, n: int, every: bool) -> Iterator[QuantTile]:
    if not every:
        yield QuantTile(4, 4, 1 if n > 8192 else 4, 4 if m <= 16 else 0)
        return
    if m > 64:
        for splits in (1,) if n > 8192 or m > 512 else (1, 2, 4):
            yield QuantTile(8, 3, splits, 0, 128)
            yield QuantTile(8, 3, splits, 0, 128, 128, True)
            if m > 128:
                yield QuantTile(8, 3, splits, 0, 128, 256, True)
            else:
                yield QuantTile(4, 3, splits, 0, 64)
        return
    for splits in (1, 2) if n > 8192 else (2, 4, 8) if m <= 16 else (2, 4):
        for stages in (4, 6) if m <= 16 else (3, 5):
            for prefetch in (0, 4) if m <= 16 else (0,):
                yield QuantTile(4, stages, splits, prefetch)


def fp8_tiles(m: int, n: int, groups: bool, every: bool) -> Iterator[Fp8Tile]:
    block_m = 64 if m <= 64 else 128
    for block_n, warps in ((64, 4), (128, 8)) if every else ((128, 8),):
        for splits in (1, 2, 4) if every and n <= 8192 and m <= 512 else (1,):
            yield Fp8Tile(block_m, block_n, warps, 4, splits)


def best(tried: Iterator[tuple[str, str, list[Callable[[], Any]]]]) -> dict[str, tuple[float, str]]:
    """Way → the µs of its fastest tile, and that; the fastest way first."""
    found: dict[str, tuple[float, str]] = {}
    for way, tile, calls in tried:
        try:
            found[way] = min(found.get(way, (INF, "")), (graph_microseconds(calls), tile))
        except Exception as error:  # a tile too large, or what this version of torch refuses
            torch.cuda.synchronize()
            print(f"    {way} {tile}: {type(error).__name__} {str(error).splitlines()[0][:100]}", flush=True)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def ways(m: int, x: Tensor, weights: list[Packed], every: bool) -> Iterator[tuple[str, str, list[Callable[[], Any]]]]:
    """What could multiply: its name, the tile, a call a weight."""
    matrix = weights[0]
    if m <= 128 or (m <= 1024 and BITS[matrix.kind] == 4):
        for few_tile in few_tiles(m, matrix.rows, every):
            calls = [lambda w=w, t=few_tile: quant_linear_triton(x, w, tile=t) for w in weights]
            yield "few rows", str(tuple(few_tile)), calls
    if fp8_linear.takes_fp8(matrix) and m >= 16:
        rows = fp8_rows.fp8_rows(x, bool(matrix.group))
        for tile in fp8_tiles(m, matrix.rows, bool(matrix.group), every):
            calls = [lambda w=w, t=tile: fp8_linear_triton(rows, w, None, t) for w in weights]
            yield "ours", str(tuple(tile)), calls
        if not matrix.group:
            yield "cuBLAS unscaled", "", [lambda w=w: fp8_product(rows, w) for w in weights]
            yield "cuBLAS, scaled", "", [lambda w=w: scaled(fp8_product(rows, w), x.dtype) for w in weights]
            by_row = rows.scales.view(-1, 1)
            for fast in (True, False):
                yield f"torch row-wise{' fast' if fast else ''}", "", [
                    lambda w=w, f=fast: torch._scaled_mm(
                        rows.values, fp8_values(w).t(), by_row, w.scales[:1, :], out_dtype=torch.bfloat16,
                        use_fast_accum=f,
                    )
                    for w in weights
                ]  # fmt: skip
    if m >= 64:
        yield "scratch", "", [lambda w=w: dequantize.dequantized_linear(x, w) for w in weights]


def compile_share(share: int, count: int, layouts: list[str], every: bool, device: torch.device) -> None:
    """Calls every `count`-th variant once, from the `share`-th on: what it compiles lands in the cache on disk."""
    variants = ((layout, shape, m) for layout in layouts for shape in ("qkv", "gate_up") for m in (1, 16, 64, 128, 256))
    place = 0
    for layout, shape, m in variants:
        kind, group, shifts = LAYOUTS[layout]
        matrix = random_matrix(kind, *SHAPES[shape], group, shifts, device)
        x = torch.randn(m, SHAPES[shape][1], device=device, dtype=torch.bfloat16)
        for _, _, calls in ways(m, x, [matrix], every and layout in MAIN):
            place += 1
            if place % count == share:
                with contextlib.suppress(Exception):  # the measurement will say it
                    calls[0]()
                    torch.cuda.synchronize()


def compile_all(layouts: list[str], quick: bool) -> None:
    count = min(12, len(os.sched_getaffinity(0)))
    command = [sys.executable, __file__, *(["--quick"] if quick else []), "--layouts", *layouts, "--share"]
    processes = [subprocess.Popen([*command, str(share), str(count)]) for share in range(count)]
    for process in processes:
        process.wait()


def quantisers(m: int, device: torch.device) -> dict[str, float]:
    x, gain = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((m, 4096), (4096,)))
    residual, wide = x.clone(), torch.randn(m, 28672, device=device, dtype=torch.bfloat16)
    product = fp8_rows.Product(wide, torch.ones(1, m, device=device), torch.ones(28672, device=device))
    from vserve.kernels.norm.activation import silu_mul
    from vserve.kernels.norm.norm import add_rms_norm

    calls: dict[str, Callable[[], Any]] = {
        "norm": lambda: add_rms_norm(x, residual, gain, 1e-6),
        "norm to FP8": lambda: fp8_rows.add_rms_norm_fp8(x, residual, gain, 1e-6),
        "silu": lambda: silu_mul(wide),
        "silu to FP8": lambda: fp8_rows.silu_mul_fp8(product, torch.bfloat16),
        "x to FP8": lambda: fp8_rows.fp8_rows(x),
        "x to FP8 by 128": lambda: fp8_rows.fp8_rows(x, True),
    }
    return {name: graph_microseconds([call] * 8) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = {"o": SHAPES["o"]} if arguments.check else SHAPES
    rows = (1, 128) if arguments.check else arguments.rows
    device = torch.device("cuda", torch.cuda.current_device())
    few.prepare(device)
    dequantize.prepare_scratch(device, torch.bfloat16)
    fp8_linear.unit(device)
    if arguments.share:
        compile_share(*arguments.share, arguments.layouts, not arguments.quick, device)
        return
    begun = time.monotonic()
    compile_all(arguments.layouts, arguments.quick)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    started, results, plain = time.monotonic(), Results(), dict[tuple[str, int], float]()
    for shape, (n, k) in shapes.items():
        count = max(2, -(-L2 * 2 // (n * k)))
        dense = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(2 if n * k > L2 else 4)]
        for m in rows:
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            plain[shape, m] = graph_microseconds([lambda w=w, x=x: linear(x, w) for w in dense])
            print(f"{shape:8s} M={m:4d} bf16 {plain[shape, m]:8.1f} us", flush=True)
        del dense
        for layout in arguments.layouts:
            kind, group, shifts = LAYOUTS[layout]
            each = 2 if BITS[kind] == 8 else 4
            weights = [random_matrix(kind, n, k, group, shifts, device) for _ in range(min(12, count * each // 2))]
            size = sum(t.numel() * t.element_size() for t in (weights[0].words, weights[0].scales))
            for m in rows if layout in MAIN else (m for m in rows if m in (1, 16, 64, 256)):
                x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
                share = weights if m <= 256 else weights[:2]
                found = best(ways(m, x, share, layout in MAIN and not arguments.quick))
                us = min((us for way, (us, _) in found.items() if way != "cuBLAS unscaled" or n > 8192), default=INF)
                results[layout, shape, m] = us
                print(
                    f"{shape:8s} M={m:4d} {layout:16s} {us:8.1f} us {plain[shape, m] / us:5.2f}x "
                    f"{(size + 2 * m * (n + k)) / us / 1e3:6.0f} GB/s {2e-6 * m * n * k / us:6.0f} TFLOP/s  "
                    + " | ".join(f"{way} {each:.1f} {tile}" for way, (each, tile) in found.items()),
                    flush=True,
                )
            del weights
    for m in rows:
        print(f"M={m}: " + ", ".join(f"{name} {us:.1f}" for name, us in quantisers(m, device).items()), flush=True)
    print("us a layer:")
    for layout in ("bf16", *arguments.layouts):
        cells = []
        for m in rows:
            found = [plain[shape, m] if layout == "bf16" else results.get((layout, shape, m), 0.0) for shape in shapes]
            cells.append(f"{m}: {sum(found):.0f}" if all(found) else "")
        print(f"{layout:16s} {'  '.join(filter(None, cells))}")
    print(f"{time.monotonic() - started:.0f} s, torch {torch.__version__}, triton {triton.__version__}")


if __name__ == "__main__":
    main()
