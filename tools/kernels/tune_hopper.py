"""Finds where linear_hopper beats cuBLAS for a weight, and with which tile: see tune.py.

Candidates are timed in turn with cuBLAS's best algorithm (and the activation after it), each long enough for the card
to settle at the clock that its power allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear
from tune_cublas import ROWS

from vserve.kernels.linear import cublaslt
from vserve.kernels.linear.cublaslt import measured_linear
from vserve.kernels.linear.linear_hopper import HopperTile, linear_hopper, silu_mul_linear_hopper
from vserve.kernels.norm.activation import silu_mul

LAYERS = 6
GAIN = 0.99  # a tile must take less than this share of the time without
MANY = 512  # rows with which the card gets to its power's limit


def candidates(rows: int, gated: bool) -> list[HopperTile]:
    if rows <= 64:
        return [HopperTile(1, count, 1) for count in ((4, 5) if gated else (4,))]  # as many as shared memory holds
    groups = [8, 16] if rows <= 2048 else [8, 16, 32]
    stages = [3, 4] if gated else [3]
    return [HopperTile(2, count, group) for count in stages for group in (groups if rows > 1024 else [16])]


def captured(product: Callable[[torch.Tensor], torch.Tensor], weights: torch.Tensor) -> torch.cuda.CUDAGraph:
    product(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    times, begun = [], time.monotonic()
    while time.monotonic() - begun < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 2 / LAYERS)
    return statistics.median(times[len(times) // 3 :])


def search(x: torch.Tensor, weights: torch.Tensor, gated: bool) -> tuple[HopperTile | None, float, float]:
    """→ the best tile, None where cuBLAS wins, its time and that of cuBLAS, in microseconds."""
    rows, (_, n, k) = x.shape[0], weights.shape
    known = cublaslt.algorithms(n, k, x.dtype)
    algorithm = known[rows] if rows < len(known) else None

    def others(weight: torch.Tensor) -> torch.Tensor:
        y = linear(x, weight) if algorithm is None else measured_linear(x, weight, algorithm)
        return silu_mul(y) if gated else y

    def ours(tile: HopperTile) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: (silu_mul_linear_hopper if gated else linear_hopper)(x, weight, tile)

    tiles = candidates(rows, gated)
    expected = others(weights[0]).float()
    for tile in tiles:
        error = (ours(tile)(weights[0]).float() - expected).norm() / expected.norm()
        assert error < 6e-3, f"{tile} differs by {error:.1e} with {rows} rows"
    graphs = [captured(product, weights) for product in (others, *map(ours, tiles))]
    if rows >= MANY:
        microseconds(graphs[0], 1.0)  # a card that was idle is faster for a while
    rounds = [[microseconds(graph, 0.2 if rows >= MANY else 0.05) for graph in graphs] for _ in range(3)]
    own, *times = map(statistics.median, zip(*rounds, strict=True))
    best, tile = min(zip(times, tiles, strict=True))
    return (tile if best < GAIN * own else None), best, own


def tune(n: int, k: int, gated: bool) -> list[dict[str, Any]]:
    """Rows for the table: for which numbers of rows which tile wins, and by how much."""
    cublaslt.prepare(torch.device("cuda", torch.cuda.current_device()))
    weights = torch.empty(LAYERS, n, k, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    found: list[dict[str, Any]] = []
    previous = 16 if gated else MANY
    for rows in ROWS if gated else [rows for rows in ROWS if rows > MANY]:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        tile, us, own = search(x, weights, gated)
        print(f"{n} x {k}{', gated' if gated else ''}, {rows} rows: {own:.1f} us, ours {us:.1f}, {tile}", flush=True)
        if tile is not None:
            case = {"n": n, "k": k, "gated": gated, "min_rows": previous + 1, "max_rows": rows}
            found.append({**case, **tile._asdict(), "us": round(us, 1), "others_us": round(own, 1)})
        previous = rows
    return found
