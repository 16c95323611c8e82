"""Finds the tiles of configs/tiles on this machine's NVIDIA GPU: python tools/kernels/tune.py TABLE … [--write].

decode, prefill: the best tile for --head-size and --dtype over a few typical batches. cublas: the algorithms of cuBLAS
that beat its own choice for the weights --shapes (NxK). linear_hopper: where our own products beat these, alone and
with SwiGLU. --write puts what was found into the GPU's file, in place of
the rows for the same case; without it, it is only printed. For small_linear's thresholds see bench_linear.py --sweep.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_attention
import torch
import triton
import tune_cublas
import tune_hopper
from bench_attention import DECODE_SWEEP, PREFILL_SWEEP, attempt, settings

from vserve.kernels.launch import tiles
from vserve.kernels.linear import cublaslt

LLAMA_8B = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
# Up to how many requests: such batches. Where the limits are, the programs on an SM come to another number.
DECODE_SHAPES: dict[int | None, list[tuple[int, ...]]] = {
    1: [(1, 256), (1, 8192), (1, 32768)],
    12: [(2, 8192), (4, 4096), (8, 1024), (12, 1100)],
    16: [(16, 1024), (16, 4096)],
    64: [(24, 1100), (32, 1024), (64, 1024), (64, 4096)],
    96: [(80, 1100), (96, 1100)],
    None: [(128, 1024), (256, 256), (256, 1024)],
}
ROW_LIMITS = (16, 4096, None)  # of the prefill table: query tokens x grouped heads


def best(run: Callable[..., Callable[..., float]], shapes: list[tuple[int, ...]], sweep: dict[str, list[int]]) -> Any:
    """The setting whose time, relative to the best on each shape, has the least geometric mean."""
    logs: dict[tuple[int, ...], float] = defaultdict(float)
    for shape in shapes:
        time = run(*shape)
        times = {tuple(options.values()): attempt(time, **options) for options in settings(sweep)}
        fastest = min(times.values())
        for options, taken in times.items():
            logs[options] += math.log(taken / fastest)
    winner = min(logs, key=lambda options: logs[options])
    print(f"{shapes}: {dict(zip(sweep, winner, strict=True))}, {math.exp(logs[winner] / len(shapes)):.3f} of the best")
    return dict(zip(sweep, winner, strict=True))


def tune_decode(case: dict[str, int]) -> list[dict[str, Any]]:
    sweep = {name: DECODE_SWEEP[name] for name in ("block_n", "num_warps", "num_stages")}
    rows = []
    for limit, shapes in DECODE_SHAPES.items():
        found = best(bench_attention.decode_run, shapes, sweep)
        tile = {"block_n": found["block_n"], "warps": found["num_warps"], "stages": found["num_stages"]}
        rows.append(case | {"max_requests": limit} | tile)
    return rows


def tune_prefill(case: dict[str, int]) -> list[dict[str, Any]]:
    group = bench_attention.HEADS // bench_attention.KV_HEADS
    rows = []
    for limit in ROW_LIMITS:
        query_len = (limit or 32768) // group
        shapes = [(1, query_len, 8192), (max(8192 // query_len, 1), query_len, query_len)]
        found = best(bench_attention.prefill_run, shapes, PREFILL_SWEEP | ({"block_m": [16]} if limit == 16 else {}))
        tile = {name: found[name] for name in ("block_m", "block_n")}
        rows.append(case | {"max_rows": limit, **tile, "warps": found["num_warps"], "stages": found["num_stages"]})
    return rows


def write(table: str, found: list[dict[str, Any]], case: dict[str, Any]) -> Path:
    """Replace the table's rows of this case in the GPU's file; a GPU without one starts from its relation's."""
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    data = json.loads(tiles.nearest(name, capability).read_text())
    data["gpu"], data["capability"] = name, list(capability)
    data["found_by"] = f"tools/kernels/tune.py, torch {torch.__version__}, triton {triton.__version__}"
    data[table] = [row for row in data.get(table, []) if not case.items() <= row.items()] + found
    path = tiles.FOLDER / f"{name.replace(' ', '_')}.json"
    path.write_text(layout(data))
    return path


def layout(data: dict[str, Any]) -> str:
    """JSON with one line a row of a table."""
    lines = []
    for name, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
        lines.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=["decode", "prefill", "cublas", "linear_hopper"])
    parser.add_argument("--head-size", type=int, default=128, choices=[64, 128, 256, 512])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shapes", nargs="*", default=LLAMA_8B, metavar="NxK")
    parser.add_argument("--gated", nargs="*", default=["28672x4096"], metavar="NxK", help="shapes that SwiGLU follows")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune.py times CUDA kernels: run it on a machine with an NVIDIA GPU")
    bench_attention.SIZE, bench_attention.DTYPE = arguments.head_size, getattr(torch, arguments.dtype)
    heads = [{"element_bytes": bench_attention.DTYPE.itemsize, "head_size": arguments.head_size}]
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    tuners: dict[str, tuple[list[dict[str, Any]], Callable[[dict[str, Any]], list[dict[str, Any]]]]] = {
        "decode": (heads, tune_decode),
        "prefill": (heads, tune_prefill),
        "cublas": (
            [{"n": n, "k": k, "version": cublaslt.version()} for n, k in shapes],
            lambda case: tune_cublas.tune(case["n"], case["k"]),
        ),
        "linear_hopper": (
            [{"n": n, "k": k, "gated": f"{n}x{k}" in arguments.gated} for n, k in shapes],
            lambda case: tune_hopper.tune(**case),
        ),
    }
    for table in arguments.tables:
        cases, tune = tuners[table]
        for case in cases:
            found = tune(case)
            if arguments.write:
                print(f"{len(found)} rows written to {write(table, found, case)}")


if __name__ == "__main__":
    main()
