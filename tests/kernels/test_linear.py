"""small_linear: the Triton kernels against products in float64, their workspace, their table, and the layer's use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.layers.linear import Linear
from vserve.engine.quant import unquantized as layer_module
from vserve.engine.quant.weights import Placement
from vserve.kernels.launch.tiles import read_table
from vserve.kernels.linear import cublaslt, linear
from vserve.kernels.linear.linear import Tile, small_linear, small_linear_rows, small_linear_triton
from vserve.kernels.norm.norm import rms_norm

CUDA = torch.cuda.is_available()
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest result: one rounding
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4608, 3584), (3584, 18944)]


def operands(
    rng: torch.Generator, device: str, dtype: torch.dtype, m: int, n: int, k: int, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x is a slice of wider rows, as of a fused product; NaN lies behind x and W."""
    x = torch.full((m + 1, k + 16), float("nan"))
    x[:m, :k] = torch.randn(m, k, generator=rng)
    weight = torch.full((n + 1, k), float("nan"))
    weight[:n] = torch.randn(n, k, generator=rng) * k**-0.5
    b = torch.randn(n, generator=rng).to(device, dtype) if bias else None
    return x.to(device, dtype)[:m, :k], weight.to(device, dtype)[:n], b


def expect(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_close(y: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[y.dtype] * max(float(expected.abs().max()), 1.0)
    assert not y.isnan().any()
    assert float((y.double() - expected).abs().max()) <= limit


def poison(device: torch.device) -> None:
    """What is left in the partial results must not matter; what is left in the counters does."""
    workspace = linear.prepare(device)
    workspace.partials.fill_(float("nan"))
    assert not workspace.counters.any()


INTERPRETED = [
    # m, n, k, tile
    (1, 32, 64, Tile(4, 32, 4, 1)),
    (1, 37, 96, Tile(16, 32, 4, 3)),
    (1, 8, 32, Tile(8, 32, 4, 3)),  # a single block of K
    (1, 37, 128, Tile(16, 32, 4, 3, splits=2)),
    (2, 48, 128, Tile(16, 32, 4, 3, splits=2)),
    (5, 37, 192, Tile(16, 32, 4, 3, splits=2, prefetch=4)),
    (3, 70, 128, Tile(32, 32, 4, 3, splits=4)),
    (4, 40, 96, Tile(32, 32, 4, 3)),
    (17, 37, 128, Tile(16, 64, 4, 3, splits=2)),
    (33, 20, 64, Tile(16, 32, 4, 3, splits=2)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k", "tile"), INTERPRETED)
def test_tiles_of_small_shapes(
    rng: torch.Generator, device: str, m: int, n: int, k: int, tile: Tile, bias: bool, dtype: torch.dtype
) -> None:
    x, weight, b = operands(rng, device, dtype, m, n, k, bias)
    out = torch.full((m + 1, n + 3), float("nan"), device=device, dtype=dtype)
    y = small_linear_triton(x, weight, b, out[:m, :n], tile=tile)
    assert y.data_ptr() == out.data_ptr()
    assert_close(y, expect(x, weight, b))
    assert out[m].isnan().all() and out[:, n:].isnan().all()


def assert_added(rng: torch.Generator, device: str, dtype: torch.dtype, n: int, k: int, tile: Tile | None) -> None:
    """One row's product, and what is there, rounded once; NaN beside it stays."""
    x, weight, bias = operands(rng, device, dtype, 1, n, k, bias=True)
    wide = torch.full((1, n + 3), float("nan"), device=device, dtype=dtype)
    residual, before = wide[:, :n], torch.randn(1, n, generator=rng).to(device, dtype)
    residual.copy_(before)
    assert small_linear_triton(x, weight, bias, residual=residual, tile=tile).data_ptr() == residual.data_ptr()
    assert_close(residual, expect(x, weight, bias) + before.double())
    assert wide[:, n:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "k", "tile"), [(32, 64, Tile(4, 32, 4, 1)), (38, 96, Tile(16, 32, 4, 3))])
def test_one_row_is_added_to_the_residual(
    rng: torch.Generator, device: str, n: int, k: int, tile: Tile, dtype: torch.dtype
) -> None:
    assert_added(rng, device, dtype, n, k, tile)


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_one_row_of_real_shapes_is_added_to_the_residual(rng: torch.Generator, device: str, n: int, k: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert_added(rng, device, dtype, n, k, None)


def test_more_rows_are_added_by_others() -> None:
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="residual of 1 row with a tile of one split, got 2 rows"):
        small_linear_triton(x, torch.ones(8, 64), residual=torch.zeros(2, 8), tile=Tile(8, 32, 4, 1))


def test_the_workspace_serves_call_after_call(rng: torch.Generator, device: str) -> None:
    """Other splits, tiles and sizes in between; the counters are back at 0 after each."""
    first = operands(rng, device, torch.float16, 3, 70, 128)
    tile = Tile(16, 32, 4, 3, splits=4)
    poison(first[0].device)
    y = small_linear_triton(*first, tile=tile)
    for m, n, splits in ((2, 128, 2), (17, 33, 4), (1, 16, 2)):
        poison(first[0].device)
        other = operands(rng, device, torch.float16, m, n, 128)
        assert_close(small_linear_triton(*other, tile=Tile(16, 32, 4, 3, splits=splits)), expect(*other))
    poison(first[0].device)
    again = small_linear_triton(*first, tile=tile)
    assert_close(y, expect(*first))
    assert torch.equal(y, again)


@pytest.mark.skipif(CUDA, reason="the order in which programs arrive is the interpreter's")
@pytest.mark.parametrize("reverse", [False, True])
def test_the_splits_order_does_not_matter(
    rng: torch.Generator, device: str, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whichever program arrives last: split 3, or, when the interpreter counts backwards, split 0."""
    from triton.runtime.interpreter import interpreter_builder

    x, weight, _ = operands(rng, device, torch.float32, 3, 16, 128)
    tile = Tile(16, 32, 4, 1, splits=4)
    straight = small_linear_triton(x, weight, tile=tile)
    if reverse:
        set_grid_idx = interpreter_builder.set_grid_idx
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_grid_idx(x, 3 - y, z))
    poison(x.device)
    assert torch.equal(small_linear_triton(x, weight, tile=tile), straight)


@pytest.mark.parametrize("bias", [False, True])
def test_torch_twin(rng: torch.Generator, bias: bool) -> None:
    x, weight, b = operands(rng, "cpu", torch.float32, 3, 20, 24, bias)
    out = torch.full((3, 20), float("nan"))
    residual = torch.ones(3, 20)
    assert small_linear(x, weight, b, residual=residual) is residual
    assert_close(residual, expect(x, weight, b) + 1)
    assert small_linear(x, weight, b, out) is out
    assert_close(out, expect(x, weight, b))
    assert_close(small_linear(x, weight, b), expect(x, weight, b))


def test_no_rows(device: str) -> None:
    weight = torch.ones(32, 64, device=device, dtype=torch.float16)
    assert small_linear_triton(weight[:0], weight).shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "weight", "tile", "message"),
    [
        (torch.ones(65, 64), torch.ones(8, 64), None, "M <= 64"),
        (torch.ones(2, 32), torch.ones(8, 64), None, "functional.linear"),
        (torch.ones(64, 2).t(), torch.ones(8, 64), None, "contiguous"),
        (torch.ones(2, 64), torch.ones(64, 8).t(), None, "contiguous"),
        (torch.ones(2, 96), torch.ones(8, 96), Tile(16, 32, 4, 1, splits=2), "K = 96"),
        (torch.ones(2, 64), torch.ones(8, 64), None, "K = 64"),
        (torch.ones(2, 64), torch.ones(8256, 64), Tile(16, 32, 4, 1, splits=2), "N = 8256"),
        (torch.ones(2, 64), torch.ones(16, 64), Tile(8, 32, 4, 1, splits=2), "blocks of 8"),
    ],
)
def test_refusals(x: Tensor, weight: Tensor, tile: Tile | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_linear_triton(x, weight, tile=tile)


@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        (6144, 4096, 1),
        (4096, 4096, 16),
        (4096, 14336, 16),
        (28672, 4096, 1),
        (128256, 4096, 0),
        (4608, 3584, 1),
        (37888, 3584, 1),
        (1024, 4096, 0),  # too small to have been worth measuring
        (4096, 4160, 0),  # no tile divides K
    ],
)
def test_where_it_is_used(n: int, k: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(linear, "pdl_available", lambda device: True)
    monkeypatch.setattr(linear, "tile_table", lambda kernel: read_table(kernel, "NVIDIA H200", (9, 0)))
    small_linear_rows.cache_clear()
    try:
        assert small_linear_rows(n, k, torch.bfloat16) == rows
        assert small_linear_rows(n, k, torch.float32) == 0
        assert small_linear_rows(n, k, torch.float16) == rows
        for m in range(1, rows + 1):  # the tile it will take divides K
            tile = linear.fma_tile(n, k) if m == 1 else linear.dot_tile(m, n)
            assert k % (tile.block_k * tile.splits) == 0
        small_linear_rows.cache_clear()
        monkeypatch.setattr(linear, "pdl_available", lambda device: False)
        assert small_linear_rows(n, k, torch.bfloat16) == 0
    finally:
        small_linear_rows.cache_clear()


def test_the_layer_sends_few_rows_there(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(8, {"out": 6}, place=Placement(torch.float32, torch.device("cpu")), bias=True)
    layer.choose({})
    layer.create()
    layer.load("out", {"weight": torch.randn(6, 8), "bias": torch.randn(6)})
    layer.finish()
    method = layer.method
    assert method.small_rows == 0
    seen = []

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, late: bool) -> Tensor:
        seen.append(len(x))
        return small_linear(x, weight, bias, residual=residual)

    monkeypatch.setattr(layer_module, "small_linear", spy)
    method.small_rows = 2
    for m in (1, 2, 3):
        x = torch.randn(m, 8)
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, method.weight, method.bias))
    assert seen == [1, 2]


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_real_shapes(rng: torch.Generator, device: str, n: int, k: int) -> None:
    x, weight, bias = operands(rng, device, torch.bfloat16, 64, n, k, bias=True)
    expected = expect(x, weight, bias)
    for m in (1, 2, 7, 16, 17, 32, 33, 64):
        if n <= linear.MAX_SPLIT_N:
            poison(x.device)
        y = small_linear(x[:m], weight, bias)
        assert_close(y, expected[:m])
        for _ in range(20):
            assert torch.equal(small_linear(x[:m], weight, bias), y)
    assert torch.equal(small_linear(x[:7], weight, bias)[:2], small_linear(x[:2], weight, bias))


@pytest.mark.gpu
@requires_cuda
def test_the_layer_uses_it_on_hopper(rng: torch.Generator, device: str) -> None:
    place = Placement(torch.bfloat16, torch.device(device, 0))
    layer = Linear(4096, {"q": 4096, "k": 1024, "v": 1024}, place=place, bias=True)
    layer.choose({})
    layer.create()
    for part, rows in layer.shape.parts.items():
        weight = torch.randn(rows, 4096, generator=rng) / 64
        layer.load(part, {"weight": weight, "bias": torch.randn(rows, generator=rng)})
    layer.finish()
    method = layer.method
    assert method.small_rows == method.add_up_to == (1 if linear.pdl_available(place.device) else 0)
    x = torch.randn(40, 4096, generator=rng).to(device, torch.bfloat16)
    for m in (0, 1, 3, 40):
        assert layer(x[:m]).shape == (m, 6144)
        if m:
            assert_close(layer(x[:m]), expect(x[:m], method.weight, method.bias))


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("m", [1, 2, 16, 24, 64])
def test_chained_in_a_cuda_graph(device: str, m: int) -> None:
    """Products that read each other's results, back to back and with other kernels between, in buffers used again.

    A kernel that starts too early reads, or overwrites, what the one before is still busy with. The same chain with a
    synchronisation after each kernel cannot go wrong that way and must give the same bits.
    """
    layers = 24
    square = torch.randn(layers, 4096, 4096, device=device, dtype=torch.bfloat16) / 64
    wide = torch.randn(4, 6144, 4096, device=device, dtype=torch.bfloat16) / 64
    gain = torch.ones(4096, device=device, dtype=torch.bfloat16)
    x = torch.empty(m, 4096, device=device, dtype=torch.bfloat16)
    buffers = torch.empty(2, m, 4096, device=device, dtype=torch.bfloat16)
    result = torch.empty_like(x)

    def chain(wait: bool) -> None:
        def done(y: Tensor) -> Tensor:
            if wait:
                torch.cuda.synchronize()
            return y

        y = done(x + 0)
        for index in range(layers):
            y = done(small_linear(y, square[index], out=buffers[index % 2]))
            if index % 3 == 1:
                y = done(rms_norm(y, gain, 1e-6, out=y))
            if index % 6 == 2:
                y = done(small_linear(y, wide[index // 6])[:, 1024:5120])
            if index % 6 == 5:
                y = done(y + x)
        result.copy_(y)

    linear.prepare(x.device)
    x.normal_()
    chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(wait=False)
    for _ in range(10):
        x.normal_()
        poison(x.device)
        chain(wait=True)
        expected = result.clone()
        assert not expected.isnan().any() and expected.any()
        for _ in range(20):
            buffers.fill_(float("nan"))
            result.fill_(float("nan"))
            graph.replay()
            assert torch.equal(result, expected)
        result.fill_(float("nan"))
        chain(wait=False)
        assert torch.equal(result, expected)
    assert not linear.prepare(x.device).counters.any()


@pytest.mark.gpu
@requires_cuda
@pytest.mark.filterwarnings("error:The CUDA Graph is empty")
def test_no_allocation_while_a_graph_is_captured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amid other kernels: refused without a workspace, after which the same works with the one that was prepared."""
    monkeypatch.setattr(linear, "_workspaces", {})
    x = torch.ones(2, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)

    def run() -> Tensor:
        x.add_(1)
        return small_linear(x, weight)

    x.add_(0)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="call prepare"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run()
    assert linear._workspaces == {}, "made in the memory of a graph"
    workspace = linear.prepare(x.device)
    small_linear(x, weight)
    torch.cuda.synchronize()
    x.fill_(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    assert list(linear._workspaces.values()) == [workspace] and linear.prepare(x.device) is workspace
    for count in (1, 2, 3):
        poison(x.device)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 4096 * count))


def test_no_workspace_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: neither this module's nor cublaslt's, which graphs share, and which would lie in one graph's."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    monkeypatch.setattr(linear, "_workspaces", {})
    monkeypatch.setattr(cublaslt, "handle", lambda device: None)
    cublaslt.workspace.cache_clear()
    for prepare in (linear.prepare, cublaslt.prepare, cublaslt.workspace):
        with pytest.raises(RuntimeError, match="call prepare"):
            prepare(torch.device("cuda", 0))


_COMPILE = """
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: sys.argv[1] == "pdl"
pdl.MAX_ROWS = 64
from vserve.kernels.linear.linear import small_linear_triton

def run(n, k, rows):
    weight = torch.empty(n, k, dtype=torch.bfloat16)
    for m in rows:
        small_linear_triton(torch.empty(m, k, dtype=torch.bfloat16), weight)

run(4096, 4096, (1, 2, 3, 16, 17, 20, 33, 64))
run(4096, 14336, (1, 2, 16, 32, 64))
run(6144, 4096, (1, 8, 32, 64))
run(28672, 4096, (1, 64))
for n, k in ((4096, 4096), (2880, 4096), (6144, 4096), (28672, 4096)):  # which add to the residual stream
    row, weight = torch.empty(1, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
    small_linear_triton(row, weight, residual=torch.empty(1, n, dtype=torch.bfloat16))
    if n in (4096, 6144):
        residual = torch.empty(1, n, dtype=torch.bfloat16) if n == 4096 else None
        small_linear_triton(row, weight, residual=residual, late=True)
report = []
published = re.compile(r"st\\.global.*bar\\.sync.*atom\\.global\\.gpu\\.acq_rel.*ld\\.global\\.cg", re.S)
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "kernel": name,
        "shared": kernel.metadata.shared,
        "launch_pdl": kernel.metadata.launch_pdl,
        "griddepcontrol": body.count("griddepcontrol"),
        "starts_others_before": "launch_dependents" in before and bool(waits),
        "loads_before": len(re.findall(r"ld\\.global|cp\\.async\\.c", before)) if waits else 0,
        "prefetches_before": before.count("prefetch.L2") if waits else 0,
        "writes_before": len(re.findall(r"st\\.global|atom\\.global|\\bret;|\\bexit;", before)) if waits else 0,
        "wgmma": "wgmma.mma_async" in body,
        "lookahead": max(map(int, re.findall(r"cp\\.async\\.wait_group\\s+(\\d+)", body)), default=0),
        "published": bool(published.search(body)),
        **resources(kernel),
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize("pdl", ["pdl", pytest.param("plain", marks=pytest.mark.slow)])
def test_compiles_for_hopper(pdl: str, run_for_hopper: Callable[..., Any]) -> None:
    """Compiles as few variants as there are tiles; fits; spills nothing; before the wait only the weight is touched."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    kernels = run_for_hopper(_COMPILE, pdl)
    names = [kernel["kernel"] for kernel in kernels]
    assert names.count("_fma_kernel") == 3 + 3 + 2
    assert names.count("_dot_kernel") == 3 + 3 + 1  # one a BLOCK_M of each tile: no size of a batch or weight adds one
    found_late = 0
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024
        # Who adds is to leave room for as many programs as who does not: registers are spilt, for behind the loop.
        late = kernel["kernel"] == "_fma_kernel" and pdl == "pdl" and not kernel["starts_others_before"]
        spilt = (16 if late else 8) if kernel["reg"] == 32 else 0
        assert kernel["stack"] <= spilt and kernel["local"] == 0, f"{kernel} spills registers"
        assert kernel["launch_pdl"] == (pdl == "pdl")
        assert kernel["griddepcontrol"] == (2 if pdl == "pdl" else 0)
        assert kernel["writes_before"] == 0
        if kernel["kernel"] == "_fma_kernel":
            found_late += late
            continue
        assert kernel["wgmma"] and kernel["lookahead"] >= 2
        assert kernel["loads_before"] == 0 and (kernel["prefetches_before"] > 0) == (pdl == "pdl")
    assert sum(kernel["published"] for kernel in kernels) == 6 and found_late == (2 if pdl == "pdl" else 0)
