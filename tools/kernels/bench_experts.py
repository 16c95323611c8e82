"""Times the products of quantised experts against 16-bit ones on an NVIDIA GPU: python tools/kernels/bench_experts.py

The experts of Qwen3-30B-A3B and gpt-oss-20b, evenly routed; a figure is µs a layer's mixture without its router, from
replays of one CUDA graph. Each number of tokens is tried with a few tiles of either product, one after the other, and
--write puts the best into the tables experts_codes and experts_fp8 of this GPU's file in configs/tiles, by rows that an
expert gets on average. Processes of their own compile all variants first, side by side. --quick: only the tiles that
the file has, no search. --layouts: some of them.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vserve.kernels.experts.expert_codes import ExpertCodes
from vserve.kernels.experts.moe_codes import CodesTile, codes_tile, experts_codes_triton
from vserve.kernels.experts.moe_fp8 import Fp8ExpertTile, experts_fp8_triton, fp8_expert_tile
from vserve.kernels.experts.moe_triton import experts_triton
from vserve.kernels.launch.tiles import nearest, read_table
from vserve.kernels.linear.planes import BITS, pack, value_of

SHAPES = {"qwen3-30b": (2048, 768, 128, 8), "gpt-oss-20b": (2880, 2880, 32, 4)}  # hidden, inner, experts, of a token
# name → kind, group, shape
LAYOUTS = {
    "int4 G=128": ("int4", 128, "qwen3-30b"),
    "mxfp4": ("e2m1", 32, "gpt-oss-20b"),
    "int8 rows": ("int8", 0, "qwen3-30b"),
    "fp8 blocks": ("e4m3", 128, "qwen3-30b"),
}
EXTRA = {"int4 G=32": ("int4", 32, "qwen3-30b"), "fp8 rows": ("e4m3", 0, "qwen3-30b")}
LIMITS = (0.5, 8, 24, 48, None)  # rows of an expert on average, of the tables' rows
BLOCKS = (16, 16, 32, 64, 128)  # and how many of them a block of theirs has
MEASURED = (1, 2, 8, 16, 32, 48, 128)  # rows on average that are timed, beside steps of 1 and 4 tokens
Tile = CodesTile | Fp8ExpertTile


class Layer(NamedTuple):
    """Codes of one layer's experts; several of them, so that none is in the L2 cache."""

    gate_up: ExpertCodes
    down: ExpertCodes


class Call(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor


def random_codes(
    kind: str, group: int, num_experts: int, parts: int, n: int, k: int, device: torch.device
) -> ExpertCodes:
    """One matrix, of all experts the same numbers of it: what they are changes no time."""
    codes = torch.randint(0, 1 << BITS[kind], (n, k), device=device, dtype=torch.uint8)
    values = value_of(kind, (), device)
    codes[~values.isfinite()[codes.int()]] = 0
    size = float(values[values.isfinite()].std()) * k**0.5
    dtype = torch.float32 if kind == "e4m3" else torch.float16
    scales = torch.full((n, -(-k // group) if group else 1), 1 / size, device=device, dtype=dtype)
    one = pack(codes, scales, kind, group)
    made = ExpertCodes.empty(num_experts, parts, one)
    for part in range(parts):
        made.of(0, part).words.copy_(one.words)
        made.of(0, part).scales.copy_(one.scales)
    made.words[1:] = made.words[0]
    made.scales[1:] = made.scales[0]
    return made


def routed(tokens: int, shape: str, device: torch.device) -> Call:
    hidden, _, experts, top_k = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator, device=device).topk(top_k).indices.int()
    x = torch.randn(tokens, hidden, generator=generator, device=device).bfloat16()
    return Call(x, ids, torch.full((tokens, top_k), 1 / top_k, device=device))


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
    times = []
    for turn in range(4):
        begin.record()
        for _ in range(1 if turn == 0 else 3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 3)
    return sorted(times[1:])[1] * 1e3 / len(calls)


def codes_tiles(product: str, rows: float, group: int) -> Iterator[CodesTile]:
    block_m = next(block for block, limit in zip(BLOCKS, LIMITS, strict=True) if limit is None or rows <= limit)
    for fold in (False, True) if group else (False,):
        if block_m == 16:
            for block_n, stages in ((64, 4), (64, 6), (128, 4)):
                yield CodesTile(16, block_n, 4, stages, fold)
        elif block_m == 32:
            for block_n, stages in ((64, 4), (128, 3), (128, 4)):
                yield CodesTile(32, block_n, 4, stages, fold)
        elif block_m == 64:
            for block_n, warps in ((128, 4), (128, 8), (256, 8)):
                yield CodesTile(64, block_n, warps, 3, fold)
        elif fold or not group:
            for block_n, stages, share in ((128, 3, 8), (128, 4, 8), (256, 3, 8), (128, 3, 1)):
                yield CodesTile(128, block_n, 8, stages, fold, share)


def fp8_tiles(product: str, rows: float) -> Iterator[Fp8ExpertTile]:
    for stages, share in ((3, 1), (3, 8), (4, 8)):
        yield Fp8ExpertTile(64, 256 if product == "gate_up" else 128, 8, stages, share)


def timed(layers: list[Layer], call: Call, tiles: tuple[Tile, Tile]) -> float:
    first, second = tiles
    calls: list[Callable[[], Any]]
    if isinstance(first, CodesTile):
        calls = [lambda one=one: experts_codes_triton(*call, *one, tiles=(first, second)) for one in layers]
    else:
        calls = [lambda one=one: experts_fp8_triton(*call, *one, tiles=(first, second)) for one in layers]
    try:
        return graph_microseconds(calls)
    except Exception as error:  # a tile too large
        torch.cuda.synchronize()
        print(f"    {tiles}: {type(error).__name__} {str(error).splitlines()[0][:100]}", flush=True)
        return float("inf")


def candidates(way: str, rows: float, group: int) -> tuple[list[Tile], list[Tile]]:
    def of(product: str) -> list[Tile]:
        return list(codes_tiles(product, rows, group) if way == "codes" else fp8_tiles(product, rows))

    return of("gate_up"), of("down")


def search(layers: list[Layer], call: Call, way: str, rows: float, group: int) -> tuple[float, tuple[Tile, Tile]]:
    """The best first product beside any second, then the best second beside that."""
    firsts, seconds = candidates(way, rows, group)
    first = min(firsts, key=lambda tile: timed(layers, call, (tile, seconds[0])))
    second = min(seconds, key=lambda tile: timed(layers, call, (first, tile)))
    return timed(layers, call, (first, second)), (first, second)


def listed(way: str, rows: float, kind: str, group: int) -> tuple[Tile, Tile]:
    """As the file has them."""
    if way == "codes":
        first, second = (codes_tile(product, rows, BITS[kind], group) for product in ("gate_up", "down"))
        return first, second
    found = [fp8_expert_tile(product, max(rows, 1000.0)) for product in ("gate_up", "down")]
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


def make(layout: str, count: int, device: torch.device) -> list[Layer]:
    kind, group, shape = (LAYOUTS | EXTRA)[layout]
    hidden, inner, experts, _ = SHAPES[shape]
    return [
        Layer(
            random_codes(kind, group, experts, 2, inner, hidden, device),
            random_codes(kind, group, experts, 1, hidden, inner, device),
        )
        for _ in range(count)
    ]


def compile_share(share: int, count: int, layouts: list[str], device: torch.device) -> None:
    """Every `count`-th variant once, from the `share`-th on: what it compiles lands in the cache on disk."""
    place = 0
    for layout in layouts:
        kind, group, shape = (LAYOUTS | EXTRA)[layout]
        layers, (_, _, experts, top_k) = make(layout, 1, device), SHAPES[shape]
        for rows in MEASURED:
            call = routed(max(1, rows * experts // top_k), shape, device)
            for way in ("codes", "fp8") if kind == "e4m3" and rows > 16 else ("codes",):
                for first, second in zip(*candidates(way, rows, group), strict=True):
                    place += 1
                    if place % count == share:
                        with contextlib.suppress(Exception):  # the measurement will say it
                            run = experts_codes_triton if way == "codes" else experts_fp8_triton
                            run(*call, *layers[0], tiles=(first, second))  # type: ignore[operator]
                            torch.cuda.synchronize()


def compile_all(layouts: list[str]) -> None:
    count = min(12, len(os.sched_getaffinity(0)))
    command = [sys.executable, __file__, "--layouts", *layouts, "--share"]
    for process in [subprocess.Popen([*command, str(share), str(count)]) for share in range(count)]:
        process.wait()


def plain_microseconds(shape: str, call: Call, device: torch.device) -> float:
    hidden, inner, experts, _ = SHAPES[shape]
    weights = [
        (
            torch.randn(experts, 2 * inner, hidden, device=device, dtype=torch.bfloat16),
            torch.randn(experts, hidden, inner, device=device, dtype=torch.bfloat16),
        )
        for _ in range(2)
    ]
    return graph_microseconds([lambda one=one: experts_triton(*call, *one) for one in weights])


def rows_of_codes(kind: str, group: int, best: dict[float, tuple[Tile, Tile]]) -> list[dict[str, Any]]:
    """Of the table experts_codes: for each limit the tiles of the most rows measured within it."""
    found = []
    for limit, above in zip(LIMITS, (0.0, *LIMITS), strict=False):
        within = [rows for rows in best if (limit is None or rows <= limit) and rows > (above or 0.0)]
        if not within:
            continue
        for product, tile in zip(("gate_up", "down"), best[max(within)], strict=True):
            case = {"product": product, "bits": BITS[kind], "max_group": 32 if 0 < group <= 32 else None}
            found.append({**case, "max_rows": limit, **tile._asdict()})
    return found


def rows_of_fp8(begin: float, tiles: tuple[Tile, Tile]) -> list[dict[str, Any]]:
    return [
        {"product": product, "min_rows": begin, "max_rows": None, **tile._asdict()}
        for product, tile in zip(("gate_up", "down"), tiles, strict=True)
    ]


def write(codes: list[dict[str, Any]], fp8: list[dict[str, Any]]) -> Path:
    """Rows of the cases that were measured take the place of those that are there."""
    path = nearest(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    data = json.loads(path.read_text())
    cases = {(row["product"], row["bits"], row["max_group"]) for row in codes}
    kept = [row for row in data["experts_codes"] if (row["product"], row["bits"], row["max_group"]) not in cases]
    # Those of small groups are looked at first.
    data["experts_codes"] = sorted(kept + codes, key=lambda row: (row["bits"], row["max_group"] or 1 << 30))
    data["experts_fp8"] = fp8 or data["experts_fp8"]
    lines = []
    for name, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
        lines.append(f"  {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=[*LAYOUTS, *EXTRA])
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    read_table("experts_codes", torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    if arguments.share:
        compile_share(*arguments.share, arguments.layouts, device)
        return
    started = time.monotonic()
    if not arguments.quick:
        compile_all(arguments.layouts)
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    codes_rows: list[dict[str, Any]] = []
    fp8_rows: list[dict[str, Any]] = []
    plain: dict[tuple[str, int], float] = {}
    for layout in arguments.layouts:
        kind, group, shape = (LAYOUTS | EXTRA)[layout]
        hidden, inner, experts, top_k = SHAPES[shape]
        layers = make(layout, 2, device)
        best: dict[float, tuple[Tile, Tile]] = {}
        faster: list[tuple[float, tuple[Tile, Tile]]] = []  # where FP8 activations are
        for tokens in (1, 4, *(rows * experts // top_k for rows in MEASURED)):
            rows, call = tokens * top_k / experts, routed(tokens, shape, device)
            if (shape, tokens) not in plain:
                plain[shape, tokens] = plain_microseconds(shape, call, device)
            found: dict[str, tuple[float, tuple[Tile, Tile]]] = {}
            for way in ("codes", "fp8") if kind == "e4m3" and rows > 16 else ("codes",):
                if arguments.quick:
                    tiles = listed(way, rows, kind, group)
                    found[way] = timed(layers, call, tiles), tiles
                else:
                    found[way] = search(layers, call, way, rows, group)
            best[rows] = found["codes"][1]
            us = min(us for us, _ in found.values())
            if "fp8" in found and found["fp8"][0] < found["codes"][0]:
                faster.append((rows, found["fp8"][1]))
            touched = experts * (1 - (1 - top_k / experts) ** tokens)
            size = touched * sum(t[0].numel() * t.element_size() for one in layers[0] for t in one[:2])
            ways = (f"{way} {each:.1f} {[tuple(tile) for tile in used]}" for way, (each, used) in found.items())
            print(
                f"{layout:12s} T={tokens:5d} {us:8.1f} us  bf16 {plain[shape, tokens]:8.1f} us "
                f"{plain[shape, tokens] / us:5.2f}x {size / us / 1e3:6.0f} GB/s "
                f"{6e-6 * tokens * top_k * hidden * inner / us:6.0f} TFLOP/s  " + " | ".join(ways),
                flush=True,
            )
        codes_rows += rows_of_codes(kind, group, best)
        if faster:
            # From between the last number of rows where they are slower and the first where they are faster.
            begin, (_, tiles) = faster[0][0], faster[-1]
            slower = [rows for rows in best if rows < begin]
            fp8_rows = rows_of_fp8(max([16.0, *slower]), tiles)
        del layers
    if arguments.write:
        print(f"written to {write(codes_rows, fp8_rows)}")
    print(f"{time.monotonic() - started:.0f} s, torch {torch.__version__}, triton {triton.__version__}")


if __name__ == "__main__":
    main()
