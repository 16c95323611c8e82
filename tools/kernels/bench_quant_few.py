"""Times quant_few's tiles on a Hopper GPU: python tools/kernels/bench_quant_few.py [--quick] [--rows M …] [--layouts …]

The weights of Llama-3.1-8B, bf16, one row unless others are named. A figure is µs a product, from replays of one CUDA
graph with the products of several different weights, so that none is left in the L2 cache. Of each tile with and
without `pipelined`: the product alone, and as it adds to the residual stream (o and down do); `in the layer`: the best
one with the kernels around it, the norm before qkv and gate_up, the activation behind the latter. Processes of their
own compile all variants first, side by side. --quick: the tables' own tiles, and of each the half of `ahead`.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_quant import L2, LAYOUTS, MAIN, SHAPES, graph_microseconds, random_matrix

from vserve.kernels.linear.planes import BITS, Packed
from vserve.kernels.linear.quant_few import MAX_ROWS, FewTile, few_tile, quant_few
from vserve.kernels.norm.activation import silu_mul
from vserve.kernels.norm.norm import rms_norm


def tiles(n: int, k: int, layout: str, quick: bool) -> Iterator[FewTile]:
    kind = LAYOUTS[layout][0]
    own = few_tile(n, k, kind)
    found = [own, own._replace(ahead=max(1, own.ahead // 2))]
    if not quick:
        sizes = itertools.product((4, 8, 16), (1, 2, 4), (16, 32), (0, 2))
        found += [FewTile(*size) for size in sizes if size[0] * size[1] <= 16]
    for tile in dict.fromkeys(found):
        yield tile._replace(pipelined=False)
        yield tile._replace(pipelined=True)


class Case:
    """A product of the layer with m rows: alone, and with what belongs to it."""

    def __init__(self, shape: str, m: int, device: torch.device) -> None:
        n, k = SHAPES[shape]
        self.norms, self.gated = shape in ("qkv", "gate_up"), shape == "gate_up"
        self.x, self.out = (torch.randn(m, size, device=device, dtype=torch.bfloat16) for size in (k, n))
        self.residual = torch.zeros_like(self.out)
        self.gain = torch.ones(k, device=device, dtype=torch.bfloat16)
        self.half = self.out[:, : n // 2].contiguous()

    def alone(self, weight: Packed, tile: FewTile) -> None:
        quant_few(self.x, weight, None, self.out, tile)

    def added(self, weight: Packed, tile: FewTile) -> None:
        quant_few(self.x, weight, None, self.residual, tile, add=True)

    def in_layer(self, weight: Packed, tile: FewTile) -> None:
        if not self.norms:
            return self.added(weight, tile)
        quant_few(rms_norm(self.x, self.gain, 1e-6), weight, None, self.out, tile)
        if self.gated:
            silu_mul(self.out, self.half)


def calls(case: Callable[[Packed, FewTile], None], weights: list[Packed], tile: FewTile) -> list[Callable[[], Any]]:
    return [lambda w=weight: case(w, tile) for weight in weights]


def compile_share(share: int, count: int, layouts: list[str], quick: bool, device: torch.device) -> None:
    """Calls every `count`-th variant once, from the `share`-th on: what it compiles lands in the cache on disk."""
    place = 0
    for layout, shape in itertools.product(layouts, SHAPES):
        kind, group, shifts = LAYOUTS[layout]
        matrix = random_matrix(kind, *SHAPES[shape], group, shifts, device)
        case = Case(shape, 1, device)
        for tile in tiles(*SHAPES[shape], layout, quick):
            for product in (case.alone, case.added):
                place += 1
                if place % count == share:
                    with contextlib.suppress(Exception):  # the measurement will say it
                        product(matrix, tile)
                        torch.cuda.synchronize()


def compile_all(layouts: list[str], quick: bool) -> None:
    count = min(12, len(os.sched_getaffinity(0)))
    command = [sys.executable, __file__, *(["--quick"] if quick else []), "--layouts", *layouts, "--share"]
    for process in [subprocess.Popen([*command, str(share), str(count)]) for share in range(count)]:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layouts", nargs="*", default=list(MAIN), choices=LAYOUTS)
    parser.add_argument("--rows", nargs="*", type=int, default=[1], help=f"up to {MAX_ROWS}")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    if arguments.share:
        compile_share(*arguments.share, arguments.layouts, arguments.quick, device)
        return
    begun = time.monotonic()
    compile_all(arguments.layouts, arguments.quick)
    print(f"compiled in {time.monotonic() - begun:.0f} s; {torch.cuda.get_device_name()}", flush=True)
    print(f"tiles are {FewTile._fields}; *: the table's", flush=True)
    for layout, (shape, (n, k)) in itertools.product(arguments.layouts, SHAPES.items()):
        kind, group, shifts = LAYOUTS[layout]
        count = min(12, max(2, -(-L2 * 16 // (n * k * BITS[kind]))))
        weights = [random_matrix(kind, n, k, group, shifts, device) for _ in range(count)]
        size = sum(values.numel() * values.element_size() for values in (weights[0].words, weights[0].scales))
        for m in arguments.rows:
            case = Case(shape, m, device)
            found: list[tuple[float, float, FewTile]] = []
            for tile in tiles(n, k, layout, arguments.quick):
                case.residual.zero_()
                try:
                    alone, added = (
                        graph_microseconds(calls(product, weights, tile)) for product in (case.alone, case.added)
                    )
                except Exception as error:  # a tile too large
                    print(f"    {tuple(tile)}: {type(error).__name__} {str(error).splitlines()[0][:100]}", flush=True)
                    continue
                found.append((alone, added, tile))
            own = few_tile(n, k, kind)
            best = min(found)[2]
            whole = graph_microseconds(calls(case.in_layer, weights, best))
            print(f"{shape:8s} M={m} {layout:16s} in the layer {whole:6.2f} us, {tuple(best)}", flush=True)
            for alone, added, tile in sorted(found)[:8]:
                mark = " *" if tile == own else ""
                print(
                    f"    {alone:6.2f} us {size / alone / 1e3:5.0f} GB/s, adding {added:6.2f} us  {tuple(tile)}{mark}",
                    flush=True,
                )
        del weights


if __name__ == "__main__":
    main()
