"""Products by measured algorithms of cuBLAS: the table's reading, the layer's use, and the algorithms themselves."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from vserve.engine.layers.linear import Linear
from vserve.engine.options.config import EngineConfig
from vserve.engine.quant import unquantized as layer_module
from vserve.engine.quant.weights import Placement
from vserve.engine.start import rank
from vserve.kernels.launch import tiles
from vserve.kernels.linear import cublaslt
from vserve.kernels.linear.cublaslt import algorithms, measured_linear

CUDA = torch.cuda.is_available()
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")


def entry(n: int, k: int, first: int, last: int, fill: str, version: int = 7) -> dict[str, Any]:
    return {"n": n, "k": k, "min_rows": first, "max_rows": last, "version": version, "algorithm": fill * 64}


def test_the_table_by_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        entry(96, 64, 17, 32, "01"),
        entry(96, 64, 40, 41, "02"),
        entry(64, 96, 1, 99, "03"),
        entry(96, 64, 50, 50, "04", version=8),
        entry(96, 64, 60, 60, "05"),
    )
    monkeypatch.setattr(cublaslt, "tile_table", {"cublas": table}.__getitem__)
    monkeypatch.setattr(cublaslt, "version", lambda: 7)
    monkeypatch.setattr(cublaslt, "describe", lambda *sizes: list(sizes))
    monkeypatch.setattr(cublaslt, "resize", lambda product, m: product.__setitem__(0, m))
    monkeypatch.setattr(cublaslt, "runs", lambda algorithm, product, device: product[0] not in (20, 21, 32, 60))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    algorithms.cache_clear()
    try:
        found = algorithms(96, 64, torch.bfloat16)
        assert len(found) == 42, "another version of cuBLAS, or of GPU: those rows do not count"
        first_bytes = [None if algorithm is None else bytes(algorithm)[0] for algorithm in found]
        ones = [None if m in (20, 21, 32) else 1 for m in range(17, 33)]  # the others' neighbours run all the same
        assert first_bytes == [None] * 17 + ones + [None] * 7 + [2] * 2
        assert algorithms(96, 64, torch.float32) == () == algorithms(96, 65, torch.bfloat16)
    finally:
        algorithms.cache_clear()


class Library:
    """cublasLt, as far as it answers what an algorithm is like."""

    def __init__(self, scheme: int, workspace: int = 0, status: int = 0) -> None:
        self.scheme, self.workspace, self.status = scheme, workspace, status

    def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
        arguments[-1]._obj.workspace_bytes = self.workspace
        return self.status

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm: Any, name: int, value: Any, *_: Any) -> int:
        assert name == 3
        value._obj.value = self.scheme
        return 0


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (Library(0), True),
        (Library(2), True),
        (Library(1), False),
        (Library(4), False),
        (Library(0, workspace=cublaslt.WORKSPACE_BYTES + 1), False),
        (Library(0, status=15), False),
    ],
)
def test_an_algorithm_that_rounds_partial_sums_is_not_run(
    library: Library, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "handle", lambda device: None)
    described = cublaslt.Product(None, None, None, None)  # type: ignore[arg-type]
    assert cublaslt.runs(cublaslt.Algorithm(), described, torch.device("cpu")) is expected


def test_products_add_up_in_fp32() -> None:
    settings = torch.backends.cuda.matmul
    names = [
        "allow_tf32", "allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ]  # fmt: skip
    before = {name: getattr(settings, name) for name in names}
    try:
        for name in names[2:]:
            setattr(settings, name, True)
        cublaslt.accumulate_in_fp32()
        assert not any(getattr(settings, name) for name in names)
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def test_an_engine_on_a_gpu_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is multiplied."""

    class Asked(Exception):
        pass

    def asked() -> None:
        raise Asked

    monkeypatch.setattr(rank, "_choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(rank, "accumulate_in_fp32", asked)
    with pytest.raises(Asked):
        rank.Rank(EngineConfig("nowhere"), lambda progress: None)


@pytest.mark.skipif(CUDA, reason="there is a cuBLAS")
def test_without_a_gpu_there_is_nothing() -> None:
    assert algorithms(28672, 4096, torch.bfloat16) == ()


def test_the_layer_asks_by_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(8, {"out": 6}, place=Placement(torch.float32, torch.device("cpu")))
    layer.choose({})
    layer.create()
    layer.load("out", {"weight": torch.randn(6, 8)})
    layer.finish()
    method = layer.method
    assert method.products == layer_module.Products()
    seen = []

    def spy(x: Tensor, weight: Tensor, algorithm: Any, residual: Tensor | None) -> Tensor:
        seen.append((len(x), bytes(algorithm)[0]))
        return linear(x, weight)

    monkeypatch.setattr(layer_module, "measured_linear", spy)
    one, two = (cublaslt.Algorithm.from_buffer_copy(bytes([number] * 64)) for number in (1, 2))
    method.products = layer_module.Products((None, None, one, two))
    for rows in (1, 2, 3, 4):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(layer(x), linear(x, method.weight))
    assert seen == [(2, 1), (3, 2)]


@pytest.mark.gpu
@requires_cuda
def test_every_algorithm_is_right(device: str) -> None:
    """At both ends of its range: close to fp32, the same every time, and the same in a CUDA graph."""
    rows = [row for row in tiles.tile_table("cublas") if row["version"] == cublaslt.version()]
    if not rows:
        pytest.skip("no algorithms for this GPU and version of cuBLAS")
    cublaslt.prepare(torch.device(device, torch.cuda.current_device()))
    for n, k in sorted({(row["n"], row["k"]) for row in rows}):
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) / 64
        table = algorithms(n, k, torch.bfloat16)
        for m in sorted(
            {row[end] for row in rows if (row["n"], row["k"]) == (n, k) for end in ("min_rows", "max_rows")}
        ):
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            expected = x.float() @ weight.float().t()
            y = measured_linear(x, weight, table[m])
            assert (y.float() - expected).norm() <= 4e-3 * expected.norm(), f"{n} x {k} by {m} rows"
            residual = torch.randn(m, n, device=device, dtype=torch.bfloat16)
            expected += residual.float()
            assert measured_linear(x, weight, table[m], residual) is residual
            assert (residual.float() - expected).norm() <= 4e-3 * expected.norm(), f"{n} x {k} by {m} rows, added"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = measured_linear(x, weight, table[m])
            for _ in range(20):
                graph.replay()
                assert torch.equal(out, y), f"{n} x {k} by {m} rows differs from call to call"


@pytest.mark.gpu
@requires_cuda
def test_every_number_of_rows(device: str) -> None:
    """All up to 512, and beyond them some of each range, which start-up has asked cuBLAS about; that takes no time."""
    shapes = {(row["n"], row["k"]) for row in tiles.tile_table("cublas") if row["version"] == cublaslt.version()}
    if not shapes:
        pytest.skip("no algorithms for this GPU and version of cuBLAS")
    cublaslt.prepare(torch.device(device, torch.cuda.current_device()))
    algorithms.cache_clear()
    started = time.process_time()
    tables = {shape: algorithms(*shape, torch.bfloat16) for shape in sorted(shapes)}
    seconds = time.process_time() - started
    print(f"start-up asks for {seconds:.3f} s about {sum(map(len, tables.values()))} numbers of rows")
    assert seconds < 0.5
    for (n, k), table in tables.items():
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) / 64
        x = torch.randn(len(table), k, device=device, dtype=torch.bfloat16)
        expected = x.float() @ weight.float().t()
        for m, algorithm in enumerate(table):
            if algorithm is None or (m > 512 and m % 61):
                continue
            error = (measured_linear(x[:m], weight, algorithm).float() - expected[:m]).norm()
            assert error <= 4e-3 * expected[:m].norm(), f"{n} x {k} by {m} rows"


@pytest.mark.gpu
@requires_cuda
def test_the_layer_uses_the_table(device: str) -> None:
    layer = Linear(4096, {"gate": 14336, "up": 14336}, place=Placement(torch.bfloat16, torch.device(device, 0)))
    layer.choose({})
    layer.create()
    for part in layer.shape.parts:
        layer.load(part, {"weight": torch.randn(14336, 4096) / 64})
    layer.finish()
    method = layer.method
    assert method.products.algorithms == algorithms(28672, 4096, torch.bfloat16)
    for m in {1, 17, 256, len(method.products.algorithms), 2000}:
        x = torch.randn(m, 4096, device=device, dtype=torch.bfloat16)
        expected = x.float() @ method.weight.float().t()
        assert (layer(x).float() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.gpu
@requires_cuda
def test_a_product_that_cublas_refuses(device: str) -> None:
    x = torch.ones(3, 20, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="cuBLAS refused"):
        measured_linear(x, torch.ones(8, 20, device=device, dtype=torch.bfloat16), cublaslt.Algorithm())
