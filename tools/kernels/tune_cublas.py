"""Finds cuBLAS's fastest algorithm for a weight and a number of rows: see tune.py.

Candidates are what its heuristic offers, the winners for other numbers of rows, and variants of the best of these with
another tile, cluster or split. All are timed briefly, six then in turn with cuBLAS's own choice: on random data, with
the weights of eight layers, and the card busy throughout.
"""

from __future__ import annotations

import ctypes
import random
import statistics
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from vserve.engine.schedule.planner import FEW_DECODES
from vserve.engine.step.graph_table import decode_sizes
from vserve.kernels.launch.tiles import tile_table
from vserve.kernels.linear import cublaslt
from vserve.kernels.linear.cublaslt import Algorithm, Candidate, measured_linear

# The sizes that CUDA graphs are padded to (engine/step/graphs.py).
ROWS = [*(rows for rows in decode_sizes(512) if rows > 16), 768, 1024, 1024 + FEW_DECODES, 2048, 4096, 8192]
LAYERS = 8
GAIN = 0.97  # an algorithm must take less than this share of cuBLAS's own choice's time
ID, TILE, SPLIT_K, REDUCTION, CUSTOM, CLUSTER = 0, 1, 2, 3, 5, 8  # CUBLASLT_ALGO_CONFIG_…
CAP_TILES, MAX_WORKSPACE = 6, 1
WIDTH = {ID: c_int, TILE: c_uint32, SPLIT_K: c_int, REDUCTION: c_uint32, CUSTOM: c_uint32, CLUSTER: c_uint16}


def attribute(algorithm: Any, name: int, value: int | None = None) -> int:
    lt, held = cublaslt.library(), WIDTH[name](value or 0)
    if value is not None:
        lt.cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), name, byref(held), c_size_t(ctypes.sizeof(held)))
    else:
        lt.cublasLtMatmulAlgoConfigGetAttribute(
            byref(algorithm), name, byref(held), c_size_t(ctypes.sizeof(held)), byref(c_size_t())
        )
    return held.value


class Search:
    def __init__(self, n: int, k: int, rows: int) -> None:
        self.n, self.k, self.rows = n, k, rows
        self.x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        self.product = cublaslt.product(rows, n, k, torch.bfloat16, k, k, n)
        self.handle = cublaslt.handle(self.x.device)

    def guesses(self) -> Iterator[Any]:
        """What cuBLAS's heuristic offers, with and without workspace (which rules split K out)."""
        lt = cublaslt.library()
        operation, a, b, c = self.product
        for size in (cublaslt.WORKSPACE_BYTES, 1 << 20, 0):
            preference, found, count = c_void_p(), (Candidate * 64)(), c_int()
            cublaslt.check(lt.cublasLtMatmulPreferenceCreate(byref(preference)))
            lt.cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE, byref(c_uint64(size)), c_size_t(8))
            cublaslt.check(
                lt.cublasLtMatmulAlgoGetHeuristic(
                    self.handle, operation, a, b, c, c, preference, 64, found, byref(count)
                )
            )
            yield from (Algorithm(*guess.algorithm) for guess in found[: count.value] if guess.status == 0)

    def tiles(self, algorithm: Any) -> list[int]:
        held, written = (c_uint32 * 1024)(), c_size_t()
        cublaslt.library().cublasLtMatmulAlgoCapGetAttribute(
            byref(algorithm), CAP_TILES, byref(held), c_size_t(4096), byref(written)
        )
        return list(held[: written.value // 4])

    def valid(self, algorithm: Any) -> bool:
        return cublaslt.runs(algorithm, self.product, self.x.device)

    def variant(self, base: Any, **changes: int) -> Any | None:
        algorithm = Algorithm(*base)
        for name, value in changes.items():
            attribute(algorithm, globals()[name], value)
        return algorithm if self.valid(algorithm) else None

    def microseconds(self, algorithm: Any, weights: Tensor) -> float:
        """A quick look: launches, no graph."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            measured_linear(self.x, weights[0], algorithm)
            start.record()
            for weight in weights:
                measured_linear(self.x, weight, algorithm)
            end.record()
        except RuntimeError:
            return float("inf")
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(weights)

    def graph(self, algorithm: Any | None, weights: Tensor) -> torch.cuda.CUDAGraph:
        def run() -> None:
            for weight in weights:
                linear(self.x, weight) if algorithm is None else measured_linear(self.x, weight, algorithm)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph

    def compare(self, algorithms: list[Any | None], weights: Tensor, rounds: int = 5, ms: float = 6) -> list[float]:
        """Medians over rounds in turn, the card busy throughout: clocks settle at what the load allows."""
        graphs = [self.graph(algorithm, weights) for algorithm in algorithms]
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(rounds):
            for graph, mine in zip(graphs, times, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()
                start.record()
                repeats = max(int(ms * 1e3 / (len(weights) * (statistics.median(mine) if mine else 60))), 2)
                for _ in range(repeats):
                    graph.replay()
                end.record()
                end.synchronize()
                mine.append(start.elapsed_time(end) * 1e3 / repeats / len(weights))
        return [statistics.median(mine) for mine in times]

    def right(self, algorithm: Any, weight: Tensor) -> bool:
        expected = self.x.float() @ weight.float().t()
        first = measured_linear(self.x, weight, algorithm)
        right = bool((first.float() - expected).norm() <= 5e-3 * expected.norm())
        for _ in range(20):  # and the same, bit for bit, every time
            right = right and torch.equal(first, measured_linear(self.x, weight, algorithm))
        return right


def search(n: int, k: int, rows: int, weights: Tensor, seeds: list[Any]) -> tuple[Search, list[Any], int]:
    """The six most promising algorithms after a quick look at all, and how many were looked at."""
    here = Search(n, k, rows)
    seen: dict[bytes, tuple[float, Any]] = {}

    def look(algorithm: Any | None) -> None:
        if algorithm is not None and bytes(algorithm) not in seen:
            seen[bytes(algorithm)] = here.microseconds(algorithm, weights), algorithm

    def best(count: int) -> list[Any]:
        return [algorithm for _, algorithm in sorted(seen.values(), key=lambda pair: pair[0])[:count]]

    for guess in here.guesses():
        look(guess)
    for seed in seeds:
        look(here.variant(seed))
    for base in best(1):
        tiles = here.tiles(base)
        for tile in random.sample(tiles, min(len(tiles), 60)):
            look(here.variant(base, TILE=tile))
    for base in best(3 if rows <= 1152 else 1):  # with more rows each look takes long
        for cluster in range(2, 9):
            for custom in range(8):
                look(here.variant(base, CLUSTER=cluster, CUSTOM=custom))
        if n <= 8192 and rows <= 512:
            for split in (1, 2, 3, 4):
                look(here.variant(base, SPLIT_K=split, REDUCTION=2 if split > 1 else 0))
    return here, best(6), len(seen)


def covered(here: Search, winner: Any, weights: Tensor, previous: int) -> int:
    """The fewest rows, above `previous`, from which on the winner still beats cuBLAS's own choice."""
    low = here.rows
    for rows in sorted({previous + 1, (previous + here.rows) // 2}, reverse=True):
        fewer = Search(here.n, here.k, rows)
        if not fewer.valid(winner):
            break
        own, ours = fewer.compare([None, winner], weights, 3, 3)
        if ours > 0.99 * own:
            break
        low = rows
    return low


def tune(n: int, k: int) -> list[dict[str, Any]]:
    """Rows for the table: for which numbers of rows which algorithm wins, and by how much."""
    known = [row for row in tile_table("cublas") if (row["n"], row["k"], row["version"]) == (n, k, cublaslt.version())]
    seeds = [Algorithm.from_buffer_copy(bytes.fromhex(row["algorithm"])) for row in known]
    weights = torch.empty(LAYERS, n, k, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    found: list[dict[str, Any]] = []
    previous = 16
    for rows in ROWS:
        here, best, count = search(n, k, rows, weights, seeds)
        times = here.compare([None, *best], weights)
        own, (us, winner) = times[0], min(zip(times[1:], best, strict=True), key=lambda pair: pair[0])
        label = "stays"
        if us < GAIN * own and here.right(winner, weights[0]):
            low = covered(here, winner, weights, previous)
            label = f"from {low} rows on"
            seeds.append(winner)
            row = {
                "n": n, "k": k, "min_rows": low, "max_rows": rows, "us": round(us, 1), "own_us": round(own, 1),
                "version": cublaslt.version(), "algorithm": bytes(winner).hex(),
            }  # fmt: skip
            found.append(row)
        print(
            f"{n} x {k}, {rows} rows: own {own:.1f} us, best of {count} {us:.1f} us ({us / own:.2f}), {label}",
            flush=True,
        )
        previous = rows
    return found
