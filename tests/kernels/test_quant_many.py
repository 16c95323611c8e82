"""Many rows beside packed codes: the Gluon kernel against what the codes mean, in Python and on a GPU; what is
compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vserve.kernels.launch.tiles import tile_table
from vserve.kernels.linear import quant_many as module
from vserve.kernels.linear import quant_many_gluon
from vserve.kernels.linear.linear import MAX_SPLIT_N, MIN_BLOCK_N, PARTIALS
from vserve.kernels.linear.planes import Packed, unpacked
from vserve.kernels.linear.quant_many import ManyTile, many_rows, quant_many, takes_many

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
SOURCE = Path(quant_many_gluon.__file__).read_text()
LAYOUTS = [
    ("int4", 128, False), ("int4", 128, True), ("int4", 32, True), ("int4", 0, False), ("int4", 0, True),
    ("int4", 256, False), ("e2m1", 32, False), ("e2m1", 16, False), ("e2m1", 0, False), ("table", 64, False),
    ("int8", 0, False), ("int8", 32, True), ("int8", 16, False), ("e4m3", 0, False), ("e4m3", 128, False),
    ("e5m2", 0, False),
]  # fmt: skip
TILES = [ManyTile(256, 4, 3), ManyTile(128, 6, 4, 2), ManyTile(64, 6, 6, 4)]


@pytest.fixture
def made(load_module: Callable[[Path], Any]) -> Callable[..., Packed]:
    """Random codes, as few rows meet them."""
    make: Callable[..., Packed] = load_module(Path(__file__).with_name("test_quant_few.py")).made
    return make


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")
@pytest.mark.parametrize(("kind", "group", "shifts"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows(
    made: Callable[..., Packed], rng: torch.Generator, kind: str, group: int, shifts: bool, dtype: torch.dtype
) -> None:
    """Of all tiles, and tails of rows, N and K; the same bits for a row whatever stands beside it."""
    for n, k in ((4096, 4096), (1000, 4096), (200, 2880), (72, 192), (1, 128)):
        matrix = made(rng, kind, n, k, group, shifts, "cuda")
        numbers, bias = unpacked(matrix).double(), torch.randn(n, generator=rng).to("cuda", dtype)
        x = torch.full((600, k + 8), float("nan"), device="cuda", dtype=dtype)
        x[:, :k] = torch.randn(600, k, generator=rng).to("cuda", dtype)
        wanted = x[:, :k].double() @ numbers.t() + bias.double()
        for tile in TILES:
            whole = quant_many(x[:, :k], matrix, bias, x.new_empty(600, n), tile)
            for m in (17, 64, 129, 256, 511):
                found = quant_many(x[:m, :k], matrix, bias, x.new_empty(m, n + 8)[:, :n], tile)
                limit = 6e-3 if dtype == torch.bfloat16 else 1e-3
                error = (found.double() - wanted[:m]).norm() / wanted[:m].norm()
                assert float(error) < limit, (n, k, m, tile)
                if n < 4096:  # else there is no room for the splits of 600 rows, and the sums are in another order
                    assert torch.equal(found, whole[:m])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")
@pytest.mark.parametrize("kind", ["e2m1", "int4", "int8"])
@pytest.mark.parametrize(("small", "large"), [(2.0**-24, 1.0), (1.0, 2.0**12)])
def test_small_numbers_and_large_scales(
    made: Callable[..., Packed], rng: torch.Generator, kind: str, small: float, large: float
) -> None:
    """Of one scale a row."""
    matrix = made(rng, kind, 1000, 4096, 0, False, "cuda")
    matrix = matrix._replace(scales=matrix.scales * large)
    x = (torch.randn(256, 4096, generator=rng) * small).to("cuda", torch.bfloat16)
    found = quant_many(x, matrix, None, x.new_empty(256, 1000), TILES[0]).double()
    wanted = x.double() @ unpacked(matrix).double().t()
    assert float((found - wanted).norm() / wanted.norm()) < 6e-3


def test_sums_stay_in_the_middle_of_fp32(made: Callable[..., Packed], rng: torch.Generator, monkeypatch: Any) -> None:
    """What rows' scales make up for is no more than leaves room for small x, and for scales above 1."""
    factors: dict[str, float] = {}
    monkeypatch.setattr(module, "descriptor", lambda *args: args)
    monkeypatch.setattr(module, "num_processors", lambda device: 132)
    for kind in ("e2m1", "e4m3", "e5m2", "int4", "int8", "table"):
        launch = SimpleNamespace(run=lambda *_, kind=kind, FACTOR, **options: factors.update({kind: FACTOR}))
        monkeypatch.setattr(module, "quant_many_kernel", {(8,): launch.run})
        x = torch.ones(20, 256, dtype=torch.bfloat16)
        quant_many(x, made(rng, kind, 1024, 256, 0, False, "cpu"), None, x.new_empty(20, 1024), ManyTile())
    assert len(factors) == 6 and all(2.0**-14 <= factor <= 2.0**120 for factor in factors.values()), factors


@pytest.mark.skipif(CUDA, reason="the same runs on the GPU")
@pytest.mark.parametrize(("kind", "group", "shifts"), LAYOUTS)
@pytest.mark.slow
def test_the_kernel_in_python(
    load_module: Callable[[Path], Any], made: Callable[..., Packed], monkeypatch: pytest.MonkeyPatch,
    rng: torch.Generator, kind: str, group: int, shifts: bool,
) -> None:  # fmt: skip
    """Its source, run on CPU tensors by schedules that hold somebody back, for sizes that tiles divide and others."""
    runner = load_module(Path(__file__).with_name("gluon_many.py"))
    orders = list(permutations(("_consume0", "_consume1", "_produce", "copy")))[rng.initial_seed() % 3 :: 9]
    for (m, n, k, tile), order in zip(
        ((70, 200, 328, ManyTile(64, 3, 2, 2)), (17, 64, 256, ManyTile(64, 2, 1)), (130, 30, 600, ManyTile(128, 4, 2))),
        orders, strict=False,
    ):  # fmt: skip
        kernel = runner.kernel(load_module, SOURCE, lambda able, order=order: min(
            range(len(able)), key=lambda i: order.index(able[i])))  # fmt: skip
        monkeypatch.setattr(module, "quant_many_kernel", kernel)
        monkeypatch.setattr(module, "descriptor", lambda *args: args)
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
        matrix, bias = made(rng, kind, n, k, group, shifts, "cpu"), torch.randn(n, generator=rng).half()
        x = torch.full((m, k + 8 - k % 8), float("nan"), dtype=torch.half)
        x[:, :k] = torch.randn(m, k, generator=rng).half()
        x = x[:, :k]
        kernel.memories = {x.data_ptr(): x, matrix.words.data_ptr(): matrix.words}
        found = quant_many(x, matrix, bias, x.new_empty(m, n + 8)[:, :n], tile)
        wanted = x.double() @ unpacked(matrix).double().t() + bias.double()
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2e-3, (m, n, k)
        assert kernel.launches == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tile_is_always_split_alike(bits: int) -> None:
    """So that a row has the same bits beside any number of rows that have this tile: there is room for its splits."""
    for row in tile_table("quant_many"):
        if row["bits"] != bits or row["splits"] == 1:
            continue
        for m in (row["min_rows"], row["max_rows"]):
            tiles = -(-m // row["tokens"]) * -(-row["max_n"] // 64)
            assert tiles * row["splits"] * 64 * row["tokens"] <= PARTIALS and tiles <= MAX_SPLIT_N // MIN_BLOCK_N, row


def test_other_devices_and_rows(made: Callable[..., Packed], rng: torch.Generator) -> None:
    assert many_rows(4096, "int4", torch.device("cpu")) == 0
    x = torch.ones(20, 136, dtype=torch.half)
    assert takes_many(x[:, :128]) and not takes_many(x[:, 1:129]) and not takes_many(torch.ones(20, 129).half())
    with pytest.raises(ValueError, match="multiples of 16 bytes: use quant_linear"):
        quant_many(x[:, 1:129], made(rng, "int4", 64, 128, 128, False, "cpu"), None, x.new_empty(20, 64), TILES[0])


_COMPILE = """
import contextlib, io
from triton.experimental.gluon._runtime import GluonJITFunction
GluonJITFunction.__getitem__ = warm_up_instead
from vserve.kernels.linear import quant_many as module
from vserve.kernels.linear.planes import pack
module.num_processors = lambda device: 132
knobs.nvidia.dump_ptxas_log = True

def matrix(kind, n, k, group, shifts):
    scales = torch.ones(n, -(-k // group) if group else 1, dtype=torch.float32 if kind == "e4m3" else torch.float16)
    codes = torch.zeros(n, k, dtype=torch.uint8)
    return pack(codes, scales, kind, group, scales if shifts else None, tuple(range(16)) if kind == "table" else ())

ARRIVE = r"mbarrier\\.arrive\\.shared\\S* _, "
report = []
for kind, group, shifts, dtype, tile in json.loads(sys.argv[1]):
    kernels.clear()
    dtype = getattr(torch, dtype)
    with contextlib.redirect_stdout(io.StringIO()) as said:  # by ptxas
        for m, n, k in ((200, 256, 1024), (199, 512, 2048)):  # none of which makes a variant of its own
            x, y = torch.empty(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
            module.quant_many(x, matrix(kind, n, k, group, shifts), None, y, module.ManyTile(*tile))
    variants = {id(kernel.asm["cubin"]): kernel for _, kernel in kernels.values()}
    (kernel,) = variants.values()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = subprocess.check_output([knobs.nvidia.nvdisasm.path, "-c", file.name], text=True)
    report.append({
        "shared": kernel.metadata.shared, "said": said.getvalue(),
        "products": re.findall(r"(HGMMA\\S+) R\\d+, (\\w+)", code),
        # One thread says for all four warps that they have read: they wait for one another before.
        "arrivals": len(re.findall(ARRIVE, kernel.asm["ptx"])),
        "after_all": len(re.findall(r"bar\\.sync[^;]*;\\s*(?://[^\\n]*\\s*)*@%p\\d+ " + ARRIVE, kernel.asm["ptx"])),
    })
print(json.dumps(report))
"""
FEW = [("int4", 128, True, "bfloat16", ManyTile(256, 4, 3)), ("int8", 0, False, "float16", ManyTile(128, 6, 4, 2))]
# The widest tile has the fewest registers to spare; a narrower one, and what float16 converts with: once a kind.
KINDS = list({kind: (kind, *rest) for kind, *rest in LAYOUTS}.values())
MORE = [(*layout, "bfloat16", TILES[0]) for layout in LAYOUTS]
MORE += [(*layout, dtype, TILES[at]) for layout in KINDS for at, dtype in ((1, "bfloat16"), (0, "float16"))]


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_compiles_for_hopper(cases: list[Any], run_for_hopper: Callable[..., Any]) -> None:
    """With numbers from registers, none of them spilt, products that run on, room in shared memory; once a tile."""
    tools = pytest.importorskip("triton.knobs").nvidia
    if not Path(tools.nvdisasm.path).exists():
        pytest.skip("triton without nvdisasm")
    for case, kernel in zip(cases, run_for_hopper(_COMPILE, json.dumps(cases)), strict=True):
        assert " 0 bytes spill stores, 0 bytes spill loads" in kernel["said"], case
        assert "wgmma" not in kernel["said"].lower(), (case, "products are serialized")
        assert kernel["products"], case
        for instruction, left in kernel["products"]:
            assert f"64x{case[4].tokens}x16" in instruction and left.startswith("R"), (case, instruction, left)
        assert kernel["shared"] <= 227 << 10, case
        assert kernel["arrivals"] == kernel["after_all"] > 0, (case, "a slot is given back before all warps have read")
