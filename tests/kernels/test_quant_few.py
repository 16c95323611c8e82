"""A few rows beside packed codes: the Gluon kernel against what the codes mean, in Python and on a GPU; what is
compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.launch.tiles import tile_table
from vserve.kernels.linear import quant_few as module
from vserve.kernels.linear.planes import BITS, Packed, pack, unpacked, value_of
from vserve.kernels.linear.quant_few import MAX_ROWS, FewTile, quant_few, streams_codes
from vserve.kernels.linear.quant_linear import quant_linear

CUDA = torch.cuda.is_available()
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
# Numbers that both 16-bit types have: a sum of one row may be near 0, where what rounding a table adds is large.
TABLE = tuple(torch.linspace(-1, 1, 16).tanh().bfloat16().tolist())
LAYOUTS = [
    ("int4", 128, False), ("int4", 128, True), ("int4", 32, True), ("int4", 0, True), ("e2m1", 32, False),
    ("e2m1", 16, False), ("table", 64, False), ("int8", 0, False), ("int8", 32, True), ("e4m3", 0, False),
    ("e4m3", 128, False), ("e5m2", 0, False),
]  # fmt: skip


def made(rng: torch.Generator, kind: str, n: int, k: int, group: int, shifts: bool, device: str) -> Packed:
    table = TABLE if kind == "table" else ()
    finite = value_of(kind, table).isfinite().nonzero().flatten()
    codes = finite[torch.randint(0, len(finite), (n, k), generator=rng)].to(torch.uint8)
    size = float(value_of(kind, table)[finite].std()) * k**0.5
    groups = -(-k // group) if group else 1
    scales = ((torch.rand(n, groups, generator=rng) + 0.5) / size).half()
    moved = (torch.randn(n, groups, generator=rng) / k**0.5).half().to(device) if shifts else None
    return pack(codes.to(device), scales.to(device), kind, group, moved, table)


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize(("kind", "group", "shifts"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows(rng: torch.Generator, kind: str, group: int, shifts: bool, dtype: torch.dtype) -> None:
    """Of all numbers of rows and tails of N and K; as near to what they mean as the products of many rows; the same
    bits for a row whatever stands beside it."""
    assert streams_codes(torch.device("cuda", torch.cuda.current_device()))
    for n, k in ((4096, 4096), (200, 2880), (72, 192), (40, 1368), (1, 128)):
        matrix = made(rng, kind, n, k, group, shifts, "cuda")
        numbers, bias = unpacked(matrix).double(), torch.randn(n, generator=rng).to("cuda", dtype)
        x = torch.randn(MAX_ROWS, k + 8, generator=rng).to("cuda", dtype)[:, :k]
        wanted = x.double() @ numbers.t() + bias.double()
        for tile in (None, FewTile(4, 2, 32, 0), FewTile(16, 1, 16, 4)):
            alone = [quant_few(x[i : i + 1], matrix, bias, x.new_empty(1, n), tile) for i in range(MAX_ROWS)]
            for m in range(1, MAX_ROWS + 1):
                found = quant_few(x[:m], matrix, bias, x.new_empty(m, n + 8)[:, :n], tile)
                limit = 6e-3 if dtype == torch.bfloat16 else 1e-3
                error = (found.double() - wanted[:m]).norm() / wanted[:m].norm()
                assert float(error) < limit, (n, k, m, tile)
                assert torch.equal(found, torch.cat(alone[:m]))
        assert torch.equal(quant_linear(x[:3], matrix, bias), quant_few(x[:3], matrix, bias, x.new_empty(3, n)))
        for tile in (FewTile(4, 2, 32, 0), FewTile(16, 1, 16, 4)):
            assert_added(rng, matrix, x, tile)


def assert_added(rng: torch.Generator, matrix: Packed, x: torch.Tensor, tile: FewTile) -> None:
    """To what is there, rounded once; a pipelined tile has the same bits."""
    n, limit = matrix.rows, 6e-3 if x.dtype == torch.bfloat16 else 2e-3
    residual = torch.randn(MAX_ROWS, n + 8, generator=rng).to(x.device, x.dtype)[:, :n]
    bias = torch.randn(n, generator=rng).to(x.device, x.dtype)
    wanted = x.double() @ unpacked(matrix).double().t() + bias.double() + residual[: len(x)].double()
    for m in {1, len(x)}:
        found = residual[:m].clone()
        assert quant_few(x[:m], matrix, bias, found, tile, add=True) is found
        assert float((found.double() - wanted[:m]).norm() / wanted[:m].norm()) < limit, (n, m, tile)
        ahead = residual[:m].clone()
        quant_few(x[:m], matrix, bias, ahead, tile._replace(pipelined=True), add=True)
        assert torch.equal(ahead, found)
        plain = quant_few(x[:m], matrix, bias, x.new_empty(m, n), tile)
        assert torch.equal(plain, quant_few(x[:m], matrix, bias, x.new_empty(m, n), tile._replace(pipelined=True)))


@pytest.mark.skipif(CUDA, reason="the same runs on the GPU")
@pytest.mark.parametrize(("kind", "group", "shifts"), LAYOUTS)
def test_the_kernel_in_python(
    load_module: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, rng: torch.Generator, kind: str, group: int,
    shifts: bool,
) -> None:  # fmt: skip
    """Its source, run on CPU tensors, for sizes that tiles divide and others."""
    here = Path(__file__)
    model, ptx = (load_module(here.with_name(name)) for name in ("gluon_tiles.py", "ptx.py"))
    kernel = model.Kernel(module.quant_few_kernel, ptx)
    monkeypatch.setattr(module, "quant_few_kernel", kernel)
    for m, n, k, tile in (
        (1, 72, 200, FewTile(2, 2)), (1, 40, 640, FewTile(2, 1, 32, pipelined=True)), (3, 64, 256, FewTile(1, 2, 32)),
        (8, 30, 600, FewTile(4, 1)),
    ):  # fmt: skip
        matrix, bias = made(rng, kind, n, k, group, shifts, "cpu"), torch.randn(n, generator=rng).half()
        x = torch.randn(m, k + 8, generator=rng).half()[:, :k]
        found = quant_few(x, matrix, bias, x.new_empty(m, n + 8)[:, :n], tile)
        wanted = x.double() @ unpacked(matrix).double().t() + bias.double()
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2e-3
        assert_added(rng, matrix, x, tile)
    assert kernel.launches == 4 + 4 * (1 + 1 + 2 + 2)


def test_other_devices_keep_their_products(rng: torch.Generator) -> None:
    assert not streams_codes(torch.device("cpu"))
    matrix = made(rng, "int4", 64, 128, 128, False, "cpu")
    with pytest.raises(ValueError, match="8 rows at most, got 9: use quant_linear"):
        quant_few(torch.ones(9, 128), matrix, None, torch.ones(9, 64))


def test_every_matrix_has_a_tile() -> None:
    """Programs of whole instructions, and tiles of 64 rows of whole programs."""
    for row in tile_table("quant_few"):
        assert row["block_n"] % 16 == 0 and 64 % row["block_n"] == 0 and row["warps"] <= 16
    found = {
        (kind, size): module.few_tile(size, size, kind)
        for kind in BITS for size in (64, 8192, 128256)
    }  # fmt: skip
    assert all(tile.pipelined for tile in found.values())


_COMPILE = """
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
from triton.experimental.gluon._runtime import GluonJITFunction
GluonJITFunction.__getitem__ = warm_up_instead
from vserve.kernels.linear import quant_few as module
from vserve.kernels.linear.planes import pack
from vserve.kernels.linear.quant_few import quant_few

def matrix(kind, n, k, group=0, shifts=False):
    scales = torch.ones(n, -(-k // group) if group else 1, dtype=torch.float32 if kind == "e4m3" else torch.float16)
    codes = torch.zeros(n, k, dtype=torch.uint8)
    return pack(codes, scales, kind, group, scales if shifts else None, tuple(range(16)) if kind == "table" else ())

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)

for kind, n, k, group, shifts in json.loads(sys.argv[1]):
    for dtype in (torch.bfloat16, torch.float16):
        quant_few(empty(3, k, dtype=dtype), matrix(kind, n, k, group, shifts), None, empty(3, n, dtype=dtype))
    for m in (1, 3):
        quant_few(empty(m, k), matrix(kind, n, k, group, shifts), empty(n), empty(m, n), add=True)
quant_few(empty(1, 1368), matrix("e4m3", 64, 1368), None, empty(1, 64))
quant_few(empty(1, 4097)[:, 1:], matrix("e4m3", 64, 4096), None, empty(1, 64))
report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "kernel": name,
        "touched_before": touches(before, 0, 5),
        "leaves_before": re.findall(r"\\b(?:st|atom)\\.(?!b64).*|\\bret;|.*launch_dep.*", before),
        "touched": len(touches(body, 0)), "written": len(touches(body, 5)), "waits": bool(waits),
        "codes_before": before.count("ld.global.L1::evict_first"),
        "mma": body.count("mma.sync"),
        "copied": body.count("cp.async.wait_group"),
        "barriers": body[: body.rindex("mma.sync")].count("bar.sync"),
        **resources(kernel),
    })
print(json.dumps(report))
"""
FEW = [
    ("int4", 8256, 4096, 128, True), ("int4", 64, 4096, 128, False), ("e4m3", 128, 14336, 0, False),
    ("e2m1", 64, 2880, 32, False),
]  # fmt: skip
MORE = [
    ("table", 64, 4096, 64, False), ("int8", 64, 4096, 0, True), ("int4", 64, 4096, 128, True),
    ("int4", 64, 14336, 128, True),
    ("int4", 64, 14336, 128, False), ("int4", 8256, 4096, 128, False),
]  # fmt: skip


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize("layouts", [FEW, pytest.param(FEW + MORE, marks=pytest.mark.slow)])
def test_compiles_for_hopper(layouts: list[Any], run_for_hopper: Callable[..., Any]) -> None:
    """Without spilt registers; neither x nor what is written is touched before the wait, and no other kernel started;
    warps do not wait for one another before their last product, but for a row that is copied."""
    import json

    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    kernels = run_for_hopper(_COMPILE, json.dumps(layouts))
    assert {kernel["kernel"] for kernel in kernels} == {"quant_few_kernel"}
    for kernel in kernels:
        assert kernel["stack"] == kernel["local"] == 0, f"{kernel} spills registers"
        assert kernel["waits"] and not kernel["touched_before"] and not kernel["leaves_before"], kernel
        assert kernel["touched"] and kernel["written"], kernel
        assert kernel["mma"] >= 8 and kernel["barriers"] == kernel["copied"], kernel
    assert sum(kernel["copied"] for kernel in kernels) == len(layouts)
    assert any(kernel["codes_before"] for kernel in kernels), "of tiles that are pipelined"
